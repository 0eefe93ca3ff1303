"""The caller's inputs: checked arguments, tensors in them, the batch's size, facts of the run."""
