"""Plan a run before it starts, by a search over estimates, for example for checkpointing."""
