"""What changed between two runs: modules matched, work and time compared, noise judged, limits for CI."""
