"""Traces of torch.profiler: as values, as files, annotated and converted.

Recording is in `record/`, explaining in `analysis/`.
"""
