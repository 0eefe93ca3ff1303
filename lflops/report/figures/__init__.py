"""Figures of the roofline and of live memory, drawn with matplotlib."""
