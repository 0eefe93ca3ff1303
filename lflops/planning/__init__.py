"""Plans before a run: changes to a model that is to be estimated, and searches over estimates for the best of them."""
