"""Monitor a training run without any change to its code.

The run is monitored if the environment variable `LFLOPS` requests it. The training loop is detected
with torch's hooks.
"""
