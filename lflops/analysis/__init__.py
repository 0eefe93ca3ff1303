"""Compute results from profiles, such as the step breakdown, the roofline and a comparison of runs.

All functions are pure, and none of them imports torch.
"""
