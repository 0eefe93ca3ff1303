"""Collect the profiles of several ranks, merge them into one profile, and find stragglers.

Only `collect/` imports torch.
"""
