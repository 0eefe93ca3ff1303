"""Build the first screen of a run: numbers, times, phases, and cards that say what to do next."""
