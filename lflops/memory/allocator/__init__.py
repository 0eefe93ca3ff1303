"""Torch's caching allocator for CUDA, simulated: from a sequence of allocations and frees to the memory that is reserved.

No torch.
"""
