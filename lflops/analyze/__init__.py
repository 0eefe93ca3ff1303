"""From a profile to results: pure functions without torch, printing or rounding.

`analysis.py` makes all results of one profile one value, each computed once. Each folder answers one question.
"""
