"""Turn results into text and data for people.

The results become lines, tables, terminal output, log text, and the payload, which is the JSON that
the HTML page draws.
"""
