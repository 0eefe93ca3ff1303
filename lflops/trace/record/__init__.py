"""torch.profiler driven over a few steps, and what its events say.

Operators, the device's work by module, its idle time.
"""
