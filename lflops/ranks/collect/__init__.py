"""The ranks of a run: where each one stands, how their reports reach rank 0, and what all of them become there."""
