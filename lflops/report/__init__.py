"""Turn results into text and data for people.

The forms are lines, tables, terminal output, log text, and the payload: the JSON that the HTML page
draws.
"""
