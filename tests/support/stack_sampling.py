"""Turn stack sampling off, in tests whose windows must have exactly the steps of their schedule.

The number of stack-sampling steps of a window depends on how long its steps take.
"""

import math

from lflops.monitoring.window import window

USUAL = window.LEAST_SAMPLED_SECONDS
"""The limit outside tests."""


def turn_off() -> None:
    """Let no window of this process request stack-sampling steps."""
    window.LEAST_SAMPLED_SECONDS = math.inf
