"""Connect lflops to training loops.

They are Lightning, transformers, custom loops, auto-detected loops, and DeepSpeed's API.
"""
