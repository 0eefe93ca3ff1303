"""Merge the profiles of many ranks into one profile: modules, steps, and statistics over ranks."""
