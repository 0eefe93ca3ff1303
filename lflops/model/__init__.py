"""Run a model forward and backward, and restore it afterwards.

The package also finds the names of modules and the owners of parameters.
"""
