"""Memory: the peak of a step, the simulated allocator, and CUDA snapshots. No torch."""
