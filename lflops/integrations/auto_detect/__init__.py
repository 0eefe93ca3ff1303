"""Monitor a training run without any change to its code, if `LFLOPS` requests it.

The training loop is detected with torch's hooks.
"""
