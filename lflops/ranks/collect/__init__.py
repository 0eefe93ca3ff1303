"""Collect the reports of all ranks on rank 0, which merges them into one profile."""
