"""Merge the profiles of many ranks into one profile: rows, steps, statistics over ranks."""
