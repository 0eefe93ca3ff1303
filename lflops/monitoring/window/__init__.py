"""Profile the steps of one window, and compute live metrics of all steps.

A window is a few consecutive steps that lflops profiles. In an unprofiled step, lflops only reads a
clock. In the other steps, it counts operators, times modules, or traces with torch.profiler.
"""
