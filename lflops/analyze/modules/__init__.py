"""Modules and operators as rows: the tree that folds repeats, totals by depth, operators, and what has no formula."""
