"""One call of a model, forward and backward, that leaves the model as it was.

Its tree of modules, parameters, random numbers.
"""
