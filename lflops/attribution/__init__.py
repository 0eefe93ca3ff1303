"""Track which module and which phase is running.

This package uses hooks on modules, autograd's sequence numbers, optimizer steps and user scopes.
"""
