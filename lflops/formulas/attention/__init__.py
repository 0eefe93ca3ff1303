"""Formulas for attention in one kernel.

They cover tensors of shape [batch, heads, length, width], packed sequences of different lengths,
and whole encoder layers.
"""
