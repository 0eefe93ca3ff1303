"""What a session is given: the training as values, the settings of the monitor, and who listens to phases."""
