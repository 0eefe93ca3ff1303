"""Define the shell command `lflops`. `main.py` lists the subcommands.

Extras add their own subcommands.
"""
