"""Record, read, annotate and convert traces of torch.profiler.

`record/` records traces, and `analysis/` explains them.
"""
