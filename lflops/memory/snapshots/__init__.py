"""Reads snapshots of CUDA memory safely, restores their peak and explains it, for `lflops memory`.

This package does not import torch.
"""
