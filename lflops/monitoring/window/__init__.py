"""The steps of one window of the schedule, and the live metrics between windows.

A step is either unprofiled, or it is a counting, module-timing or traced step.
"""
