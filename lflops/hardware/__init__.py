"""What chips can do: peak FLOP/s by dtype, memory bandwidth and memory size.

`chips.toml` is the table. `chips` reads it and the user's own, and looks a chip up by the name that
its driver reports. `lflops.hardware.lookup` is public.
"""

from lflops.hardware.chips import DTYPES, Hardware, lookup, names

__all__ = ["DTYPES", "Hardware", "lookup", "names"]
