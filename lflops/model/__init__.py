"""Call a model forward and backward, and restore it afterwards.

Also has the module tree, the parameters and the random number states.
"""
