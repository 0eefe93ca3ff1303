"""What several ranks do together: which of them is slow and where, and the work of the model that they share."""
