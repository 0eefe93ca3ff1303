"""Estimate a step without running it.

Counts and peak memory come from fake tensors. The package also finds the largest batch that fits.
"""
