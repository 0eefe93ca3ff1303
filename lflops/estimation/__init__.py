"""Estimate the work and the peak memory of a step before the run, without a GPU.

The model runs on fake tensors, which have shapes but no values. The package also predicts the time
of the step, and finds the largest batch that fits into memory.
"""
