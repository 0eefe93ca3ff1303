"""Monitor custom training loops with `lflops.monitor`, and detect their phases."""
