"""From a profile to results: step breakdown, roofline, utilization, comparison, what-if.

Pure functions. No torch.
"""
