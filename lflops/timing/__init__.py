"""Seconds of modules and phases.

Clocks, timestamps at module boundaries, the hooks' own overhead, and scaling to unprofiled steps.
"""
