"""Choose the mesh, the micro batch or the checkpointing of a training run from estimates."""
