"""Seconds of modules and phases.

Clocks, timestamps at module boundaries, the overhead of hooks, and scaling to unprofiled steps.
"""
