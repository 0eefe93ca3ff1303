"""The inputs of a session.

They are the description of the training run, the settings of the monitor, and the phases of the
training loop.
"""
