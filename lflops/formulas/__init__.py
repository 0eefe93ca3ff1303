"""What an operator costs, as pure functions of shapes.

A file for each family of operators, and the table of all of them.

Nothing here imports torch: the dispatch mode counts real calls with these formulas, and the reader
of traces counts recorded ones.
"""
