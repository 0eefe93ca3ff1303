"""Formulas for kernels of other packages, with a file for each package.

The packages are not imported here and need not be installed. To add a kernel, write a function of
shapes: with `@formula("package::operator")` if the kernel is an operator of the dispatcher, with
`@function_formula("module:function")` if the package calls it directly. `per_element` is the
formula for a fixed number of operations per element. Each kernel needs a case in
`tests/support/package_cases.py`, and its schema in `package_stand_ins.py`.
"""
