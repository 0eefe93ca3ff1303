"""One window of the schedule, step by step: clean, counted, hooked and traced steps, and the live metrics between windows."""
