"""Monitor custom training loops: `lflops.monitor` and the phases of such a loop."""
