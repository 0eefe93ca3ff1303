"""The peaks that this machine reaches, measured."""
