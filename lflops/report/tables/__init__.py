"""Tables as values: which columns a table of modules or operators has, and the same table as Markdown, LaTeX or CSV."""
