"""Traces of torch.profiler: in memory, in files, annotated and converted.

`record/` records traces, and `analysis/` explains them.
"""
