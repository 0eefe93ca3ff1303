"""Training loops that lflops connects to.

Lightning, transformers, your own loop, loops that it detects, and DeepSpeed's API.
"""
