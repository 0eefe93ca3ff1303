"""What Nsight Compute counts: read from its CSV or log, and shown by `lflops roofline --ncu`."""
