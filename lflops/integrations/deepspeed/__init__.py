"""Provide a replacement for DeepSpeed's profiler under the same names.

This package has the profiler's API, config section and text report, and reads facts from
DeepSpeed's engine.
"""
