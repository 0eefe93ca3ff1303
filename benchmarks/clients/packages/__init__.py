"""One file for each client: a training run as the documentation of its package starts it."""
