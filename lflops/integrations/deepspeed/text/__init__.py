"""The text report in the form and with the labels that users of DeepSpeed's profiler know."""
