"""Every private name of torch that lflops uses, by subject, and the check that they still mean what lflops takes them to mean."""
