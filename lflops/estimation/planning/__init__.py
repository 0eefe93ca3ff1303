"""Plans before a run: searches over estimates, as for what to recompute."""
