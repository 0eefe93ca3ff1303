"""A monitor in any Trainer by the variable `LFLOPS`, without a line of code."""
