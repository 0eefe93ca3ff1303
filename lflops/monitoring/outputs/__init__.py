"""Where a window's results go: log, files, TensorBoard and the other loggers."""
