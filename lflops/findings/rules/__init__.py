"""One file for each rule, or for a few rules that belong together."""
