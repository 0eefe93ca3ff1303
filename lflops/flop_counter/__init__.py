"""MACs, FLOPs, bytes and live memory of a step, by module.

The dispatch mode that sees every operator, and what it adds up.
"""
