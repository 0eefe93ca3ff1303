"""Compare two runs.

Pair their modules, compare work and times, separate changes from noise, and check limits for CI.
"""
