"""The callback `FlopsMonitor`.

This folder and the ones below it are the only code that imports Lightning.
"""
