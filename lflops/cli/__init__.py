"""Define the shell command `lflops`. `main.py` lists the subcommands.

Extras (optional folders of lflops) add more subcommands.
"""
