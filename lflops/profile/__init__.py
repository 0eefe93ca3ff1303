"""Define the result of a measurement: a `Profile` and its JSON file.

A profile describes modules and their work, operators, memory, steps, ranks, traces and notes. Its
values are immutable and in SI units, and it contains no sentences and no torch objects. Every
measurement makes a profile, and all analyses and reports are made from profiles.
"""
