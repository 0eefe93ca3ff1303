"""The ledger: every second of a run in one category, the cause of each slow step, in a file that survives the process.

No torch.
"""
