"""Write the results of a window: files, text for the log, TensorBoard and other loggers.

A window is a few consecutive steps that lflops profiles.
"""
