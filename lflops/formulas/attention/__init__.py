"""Attention in one kernel: of [batch, heads, length, width], of packed sequences of several lengths, and whole encoder layers."""
