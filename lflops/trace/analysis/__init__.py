"""Reads, merges, explains and draws traces of torch.profiler, for `lflops trace`.

This package does not import torch.
"""
