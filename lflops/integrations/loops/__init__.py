"""Training loops that people write themselves.

`lflops.monitor`, and where the phases of such a loop come from.
"""
