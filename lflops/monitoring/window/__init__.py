"""One window of the schedule, step by step.

Clean, counted, hooked and traced steps, and the live metrics between windows.
"""
