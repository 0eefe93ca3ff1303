"""A monitor for a script that says nothing of one: Lightning asks here, whenever a Trainer is made.

Where lflops is installed, every training runs this file, so it imports nothing that was not asked for.
"""

from typing import Any

from lflops.watch.entry import settings_line


def monitors() -> list[Any]:
    """A monitor, if the variable `LFLOPS` asks for one; a `MisconfigurationException` where it says something that cannot be."""
    asked = settings_line()
    if asked is None:
        return []
    from lflops.lightning.injection.injected import InjectedMonitor

    return [InjectedMonitor(asked)]
