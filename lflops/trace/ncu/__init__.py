"""Read the counts of Nsight Compute from its CSV or log, for `lflops roofline --ncu`."""
