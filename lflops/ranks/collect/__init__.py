"""Send the profiles of all ranks to rank 0, which merges them into one profile."""
