"""A monitor for a script that says nothing of one: Lightning asks here, whenever a Trainer is made.

Where lflops is installed, every training runs this file, so it imports nothing that was not asked for.
"""

import os
from typing import Any


def monitors() -> list[Any]:
    """A monitor, if the variable `LFLOPS` asks for one; a `MisconfigurationException` where it says something that cannot be."""
    asked = os.environ.get("LFLOPS", "").strip()
    if asked.lower() in {"", "0", "false", "no", "off"}:
        return []
    from lflops.lightning.injection.injected import InjectedMonitor

    return [InjectedMonitor("" if asked.lower() in {"1", "true", "yes", "on"} else asked)]
