"""Roofline and live memory as pictures, drawn by matplotlib."""
