"""Torch's snapshots of CUDA memory: read safely, brought back to the moment of the peak, and explained.

`lflops memory`. No torch.
"""
