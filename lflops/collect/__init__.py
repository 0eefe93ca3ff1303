"""What runs inside torch and ends in a `Profile`. The files here are what people call; the folders are what these are made of."""
