"""Monitor a training run without any change to its code, if `LFLOPS` requests it.

Hooks of torch detect the training loop.
"""
