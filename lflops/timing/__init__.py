"""Measure the seconds of modules and phases.

This folder has clocks, timestamps at module boundaries, the overhead of hooks, and scaling to
unprofiled steps.
"""
