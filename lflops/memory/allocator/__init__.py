"""A simulation of torch's caching allocator for CUDA: the memory that requests reserve.

No torch.
"""
