"""Draw tables for a terminal with rich."""
