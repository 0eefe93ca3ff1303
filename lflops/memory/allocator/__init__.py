"""Simulate torch's caching allocator for CUDA, to predict how much memory it reserves.

This package does not import torch.
"""
