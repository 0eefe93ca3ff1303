"""Track which module and which phase is running.

Uses hooks on modules, autograd's sequence numbers, optimizer steps and user scopes.
"""
