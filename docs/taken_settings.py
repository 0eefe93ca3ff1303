"""Document the arguments of `FlopsMonitor` on the site: the fields of its settings."""

from typing import Any

import griffe


class TakenSettings(griffe.Extension):
    """Replaces the parameters of `FlopsMonitor` by the fields of `Settings`."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the constructor after the package is loaded."""
        pkg["integrations.lightning.monitor.FlopsMonitor.__init__"].parameters = pkg[
            "monitoring.inputs.settings.Settings"
        ].parameters
