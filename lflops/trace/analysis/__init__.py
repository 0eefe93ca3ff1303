"""Any trace of torch.profiler: read, merged with those of other ranks, explained, and drawn.

`lflops trace`. No torch.
"""
