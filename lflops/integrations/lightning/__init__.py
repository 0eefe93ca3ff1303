"""The callback `FlopsMonitor`.

Only this package imports Lightning.
"""
