"""Collect the profiles of several ranks, merge them into one profile, and find stragglers.

A straggler is a rank that the other ranks wait for.

Only `collect/` imports torch.
"""
