"""A step that is never run.

Counts and peak memory from fake tensors, and the largest batch that fits.
"""
