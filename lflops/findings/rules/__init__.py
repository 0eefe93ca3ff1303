"""Define the rules: one file for each rule, or for a few rules that belong together."""
