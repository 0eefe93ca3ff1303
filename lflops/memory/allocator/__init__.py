"""Simulates torch's caching allocator for CUDA, and the memory that it reserves for requests.

This package does not import torch.
"""
