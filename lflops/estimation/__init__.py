"""Estimate a step without running it.

Counts and peak memory come from fake tensors. Also finds the largest batch that fits.
"""
