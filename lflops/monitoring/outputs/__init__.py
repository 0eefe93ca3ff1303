"""The outputs for a window's results: files, text for the log, TensorBoard and other loggers."""
