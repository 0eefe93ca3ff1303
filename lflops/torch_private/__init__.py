"""Contain every private torch name that lflops uses, grouped by subject, with a check of each."""
