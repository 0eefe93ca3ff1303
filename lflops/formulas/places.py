"""Where an operator's schema has the arguments that formulas ask for by name, for traces, which list arguments without names.

`places.toml` is the table; `tests/formulas/test_places.py` compares it with the schemas of the torch that is installed.
"""

from pathlib import Path

import msgspec

_ROWS = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, dict[str, int]])

PLACES = {name if "::" in name else f"aten::{name}": places for names, places in _ROWS.items() for name in names.split()}
"""By operator, the place of each argument."""
