"""Connect lflops to training loops.

There are integrations for Lightning, transformers, custom loops and auto-detected loops. Another
package replaces DeepSpeed's profiler.
"""
