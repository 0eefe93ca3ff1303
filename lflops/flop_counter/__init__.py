"""Count the MACs, FLOPs, moved bytes and live memory of a step, by module.

A dispatch mode receives every operator, and an accumulator adds up the work of the operators.
"""
