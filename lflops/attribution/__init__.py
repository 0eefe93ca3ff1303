"""Which module and which phase is running now.

Hooks on modules, autograd's sequence numbers, optimizer steps, user scopes.
"""
