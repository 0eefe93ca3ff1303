"""What the page and the TensorBoard tab draw, as one JSON value with a part for each view."""
