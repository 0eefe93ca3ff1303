"""Formulas for attention that runs as one kernel.

Some kernels work on tensors of shape [batch, heads, length, width], and some on packed sequences of
different lengths. Other kernels run a whole encoder layer.
"""
