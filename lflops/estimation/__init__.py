"""A step that is never run: counts and peak memory from fake tensors, and the largest batch that fits."""
