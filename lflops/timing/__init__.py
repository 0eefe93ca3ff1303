"""Measure the seconds of modules and of the phases of a step.

This folder has clocks, and hooks that take a timestamp whenever a module begins or ends. The
overhead of the hooks is subtracted, and the rest is scaled to the time of steps without hooks.
"""
