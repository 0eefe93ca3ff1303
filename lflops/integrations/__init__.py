"""Connect lflops to training loops.

There are integrations for Lightning, transformers, custom loops and auto-detected loops. The
package `deepspeed` is a replacement for DeepSpeed's profiler.
"""
