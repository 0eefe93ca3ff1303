"""What a session is given.

The training as values, the settings of the monitor, and who listens to phases.
"""
