"""Compare two runs.

The modules of the runs are paired, then their work and times are compared. Changes are separated
from noise, and can be checked against limits in CI.
"""
