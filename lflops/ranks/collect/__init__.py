"""Collect the reports of all ranks on rank 0, where they are merged into one profile."""
