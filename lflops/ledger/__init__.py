"""The ledger: a category for every second of a run and a cause for each slow step, in a file.

The file survives the process. This package does not import torch.
"""
