"""Read, merge, explain and draw torch.profiler traces, for `lflops trace`.

This package does not import torch.
"""
