"""Snapshots of CUDA memory: read safely, restored to the moment of the peak, and explained.

`lflops memory`. No torch.
"""
