"""Tables for a terminal, drawn by rich."""
