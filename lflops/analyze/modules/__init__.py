"""Modules and operators as rows: the tree that folds repeats, operators, and what has no formula."""
