"""Compare two runs: pair their modules, compare work and times, separate changes from noise, check limits for CI."""
