"""Every private name of torch that lflops uses, by subject, and a check of what they mean."""
