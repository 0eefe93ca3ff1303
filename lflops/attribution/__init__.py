"""Which module and which phase is running now: hooks on modules, autograd's sequence numbers, optimizer steps, user scopes."""
