"""Merge the profiles of many ranks into one profile, and compare the times of the ranks."""
