"""Provide a replacement for DeepSpeed's profiler with the same names.

This package has the same API, reads the same section of the config, and prints the same text
report. The sizes of parallel groups and the timers are read from DeepSpeed's engine.
"""
