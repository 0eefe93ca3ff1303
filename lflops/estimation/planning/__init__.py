"""Plan a run before it starts, for example its checkpointing, by searching over estimates."""
