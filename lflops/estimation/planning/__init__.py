"""Choose settings of a run before it starts, such as its checkpointing, from estimates."""
