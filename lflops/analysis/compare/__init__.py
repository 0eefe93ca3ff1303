"""Compare two runs.

The modules of the two runs are paired, and then their work and times are compared. Changes are
separated from noise. The second run can be checked against limits in CI.
"""
