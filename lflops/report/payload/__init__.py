"""Build the data of the page and the TensorBoard tab: one JSON value with a part for each view."""
