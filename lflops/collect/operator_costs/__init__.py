"""The cost of one call of an operator: by the formulas of its shapes, by what a user registered, or from the tensors themselves.

`table.py` finds what computes a cost, and has those of the operators whose shapes do not tell it: masks, packed weights.
"""
