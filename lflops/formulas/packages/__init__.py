"""Kernels of other packages, a file for each.

By the names under which a package registers its operators, or calls its own functions.

No package is imported here, and none has to be installed. A new kernel is a function of shapes:
with `@formula("package::operator")` if the dispatcher sees it, with
`@function_formula("module:function")` if the package calls it directly. What costs so many
operations an element is a row for `per_element`. It needs a case in
`tests/support/package_cases.py`, and its schema in `package_stand_ins.py`.
"""
