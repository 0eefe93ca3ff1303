"""Simulate torch's caching allocator for CUDA, and the memory that it reserves.

This package does not import torch.
"""
