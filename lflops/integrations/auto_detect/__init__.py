"""Monitoring without any change to the code, if the variable `LFLOPS` requests it.

Hooks of torch detect the training loop.
"""
