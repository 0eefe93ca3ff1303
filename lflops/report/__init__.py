"""From results to what a person reads.

Lines, tables, a terminal, the log, and the payload that the page draws.
"""
