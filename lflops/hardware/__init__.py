"""What chips can do: peak FLOP/s by dtype, memory bandwidth and memory size.

`chips.toml` is the table, `table_file` reads it and the user's own, `chips` looks a chip up by the name that its driver reports.
`lflops.hardware.lookup` is public.
"""

from lflops.hardware.chips import Hardware, lookup, names
from lflops.hardware.table_file import DTYPES

__all__ = ["DTYPES", "Hardware", "lookup", "names"]
