"""Formulas for attention that runs as one kernel.

The kernels work on tensors of shape [batch, heads, length, width], on packed sequences of different
lengths, or run a whole encoder layer.
"""
