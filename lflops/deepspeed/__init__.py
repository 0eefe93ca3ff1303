"""DeepSpeed's profiler under its own names: its API, what its engine knows of a run, and its config section."""
