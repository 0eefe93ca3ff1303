"""Build the first screen of a run: figures, times, phases, and cards that say what to do next."""
