"""Which rank is slow, and where."""
