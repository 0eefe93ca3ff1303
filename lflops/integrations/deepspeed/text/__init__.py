"""Write the text report in the format of DeepSpeed's profiler, with the same labels."""
