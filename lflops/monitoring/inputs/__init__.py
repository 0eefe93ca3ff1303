"""Define the inputs of a session, which monitors one stage of a training run.

The inputs are the description of the run, the settings of the monitor, and the phases of the
training loop.
"""
