"""DeepSpeed's profiler under its own names.

Its API, what its engine stores about a run, its config section, and its text.
"""
