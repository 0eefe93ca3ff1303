"""The result of collection, as one value: a `Profile` and its JSON file.

Frozen values in SI units, without sentences and without torch: modules and their work, operators,
memory, steps, ranks, traces, notes. Collection ends with one, and everything after it is a function
of one.
"""
