"""Run torch.profiler over a few steps, and read the recorded events.

The results are operators, device work by module, and the idle time of the device.
"""
