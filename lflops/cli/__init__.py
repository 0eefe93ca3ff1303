"""The shell command `lflops`: a file for each subcommand; extras add theirs."""
