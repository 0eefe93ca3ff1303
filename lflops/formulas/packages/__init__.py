"""Formulas for kernels of other packages, with a file for each package.

The packages are not imported here and need not be installed. To add a kernel, write a function of
shapes. Decorate it with `@formula("package::operator")` if the kernel is an operator of the
dispatcher, or with `@function_formula("module:function")` if the package calls the kernel directly.
`per_element` is the formula for a fixed number of operations per element. Each kernel needs a case
in `tests/support/package_cases.py`, and a schema in `package_stand_ins.py`.
"""
