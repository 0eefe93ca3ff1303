"""Several ranks: collect their profiles, merge them into one, and find stragglers.

Only `collect/` imports torch.
"""
