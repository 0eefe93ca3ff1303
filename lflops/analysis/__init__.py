"""Compute results from a profile: step breakdown, roofline, utilization, comparison, what-if.

All functions are pure, and none of them imports torch.
"""
