"""How a user passes lflops a setting that a report lacks.

In a loop that lflops has detected by itself, the script passes nothing to lflops.
"""

from lflops.profile.profile import Run


def how_to_measure_peak(run: Run) -> str:
    """Return the advice on how to let lflops measure the peak of the chip."""
    if run.is_auto_detected:
        return "set LFLOPS=hardware=measure"
    return 'pass hardware="measure"'


def how_to_pass_units(run: Run) -> str:
    """Return the advice on how to tell lflops the number of samples and tokens of a batch."""
    if run.is_auto_detected:
        return "pass units= to lflops.monitor in the script"
    return "pass units="
