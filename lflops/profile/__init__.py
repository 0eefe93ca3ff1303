"""Define the result of a measurement: a `Profile` and its JSON file.

A profile has frozen values in SI units, without sentences and without torch objects: modules and
their work, operators, memory, steps, ranks, traces, notes. Every measurement makes a profile, and
all analysis and reports are functions of a profile.
"""
