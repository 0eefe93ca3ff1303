"""Profiles of many ranks become one profile of the run: rows, steps, statistics over ranks."""
