"""Connect lflops to training loops.

There are integrations for Lightning, transformers, custom loops and auto-detected loops, and for
DeepSpeed's API.
"""
