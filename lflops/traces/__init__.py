"""The traces that a training writes, as files: annotated with modules, and converted for other readers. No torch."""
