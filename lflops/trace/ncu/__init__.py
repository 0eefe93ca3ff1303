"""The counts of Nsight Compute, read from its CSV or log and shown by `lflops roofline --ncu`."""
