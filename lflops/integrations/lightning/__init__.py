"""The integration with Lightning: the callback `FlopsMonitor`.

Only this package imports Lightning.
"""
