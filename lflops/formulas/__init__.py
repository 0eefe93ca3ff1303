"""Compute the cost of an operator from shapes, with pure functions.

Each family of operators has a file, and `table.py` has the table of all formulas.

Nothing here imports torch. The dispatch mode counts real calls with these formulas, and the trace
reader counts recorded calls.
"""
