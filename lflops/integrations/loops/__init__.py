"""Monitor custom training loops with `lflops.monitor`, and detect the phases of their steps."""
