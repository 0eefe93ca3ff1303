"""Formulas for kernels of other packages. Each package has a file.

The packages are not imported here and need not be installed. To add a kernel, write a function of
shapes. Decorate it with `@formula("package::operator")` if the kernel is an operator that torch
dispatches, or with `@function_formula("module:function")` if the package calls the kernel directly.
If a kernel has a fixed number of operations per element, use `per_element`. Each kernel needs a
test case in `tests/support/package_cases.py`, and a schema in `tests/support/package_stand_ins.py`.
"""
