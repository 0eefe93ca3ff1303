"""Read the caller's inputs: check arguments, find tensors and the batch size, describe the run."""
