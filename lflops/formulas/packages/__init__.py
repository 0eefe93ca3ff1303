"""Kernels of other packages, a file for each package.

No package is imported here, and none has to be installed. A new kernel is a function of shapes:
with `@formula("package::operator")` if the kernel is an operator of the dispatcher, with
`@function_formula("module:function")` if the package calls it directly. `per_element` is the
formula for a fixed number of operations per element. Each kernel needs a case in
`tests/support/package_cases.py`, and its schema in `package_stand_ins.py`.
"""
