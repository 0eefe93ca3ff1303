"""Define the shell command `lflops`, with one file for each subcommand.

Extras add their own subcommands.
"""
