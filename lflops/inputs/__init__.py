"""What a caller gives: arguments checked, tensors found in them, samples and tokens of a batch, facts of the run."""
