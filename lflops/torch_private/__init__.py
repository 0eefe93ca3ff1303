"""Contain every private name of torch that lflops uses, by subject, with a check of each name."""
