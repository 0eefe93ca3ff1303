"""Look up the limits of chips: peak FLOP/s by dtype, memory bandwidth and memory size.

`chips.toml` is the table of chips that is part of lflops. The module `chips` reads this table and
the user's table, and finds a chip by the name that its driver reports.
"""

from lflops.hardware.chips import DTYPES, Hardware, lookup, names

__all__ = ["DTYPES", "Hardware", "lookup", "names"]
