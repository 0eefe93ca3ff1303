"""Provide DeepSpeed's profiler under its own names.

This package has its API, facts from its engine, its config section, and its text report.
"""
