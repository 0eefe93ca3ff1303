"""The ledger: the time account of a whole run, which is kept in a file.

Every second of the run belongs to one category, and each slow step has a cause. The file remains if
the process is killed. This package does not import torch.
"""
