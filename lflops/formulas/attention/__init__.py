"""Attention in one kernel.

Of [batch, heads, length, width], of packed sequences of several lengths, and whole encoder layers.
"""
