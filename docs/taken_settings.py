"""What `make docs` shows of `FlopsMonitor`.

The arguments of the settings that its constructor takes.
"""

from typing import Any

import griffe


class TakenSettings(griffe.Extension):
    """Puts the fields of `Settings` in the place of what `takes` is given."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Look at the package once all of it is read."""
        pkg["integrations.lightning.monitor.FlopsMonitor.__init__"].parameters = pkg[
            "monitoring.inputs.settings.Settings"
        ].parameters
