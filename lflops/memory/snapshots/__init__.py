"""Read snapshots of CUDA memory safely, and explain the peak, for `lflops memory`.

This package does not import torch.
"""
