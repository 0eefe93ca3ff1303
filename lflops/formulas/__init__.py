"""Formulas: functions that compute the cost of an operator from the shapes of its arguments.

Each family of operators has a file, and `table.py` has the table of all formulas.

Nothing here imports torch. The dispatch mode uses the formulas for operators that run, and the
trace reader uses them for operators in a trace.
"""
