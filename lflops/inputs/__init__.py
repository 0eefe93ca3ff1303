"""Read what a user passes: check arguments, find tensors and the batch size, describe the run."""
