"""DeepSpeed's profiler under its own names.

Its API, what its engine knows of a run, its config section, and its text.
"""
