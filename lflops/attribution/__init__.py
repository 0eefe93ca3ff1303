"""Find out to which module and which phase of a step each operator belongs.

The information comes from hooks on modules and optimizers, from the sequence numbers of autograd
nodes, and from the parts of a step that the user names with `lflops.scope`.
"""
