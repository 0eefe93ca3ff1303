"""Explain memory: the peak of a step, the simulated allocator, and CUDA snapshots.

This package does not import torch.
"""
