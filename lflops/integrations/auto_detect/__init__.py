"""Monitor a training run without any change to its code.

This is done if the environment variable `LFLOPS` requests it. The training loop is detected with
torch's hooks.
"""
