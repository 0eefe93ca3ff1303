"""From results to what a person reads: lines, tables, a terminal, the log, and the payload that the page draws."""
