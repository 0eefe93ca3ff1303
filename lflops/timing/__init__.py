"""Seconds of modules and phases: clocks, timestamps at module boundaries, the hooks' own overhead, and scaling to clean steps."""
