"""Compare two runs.

Pair the modules, compare work and times, separate changes from noise, and check limits for CI.
"""
