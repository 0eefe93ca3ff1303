"""The rule about the time of loggers."""

from lflops.findings.rule import Threshold
from lflops.findings.run_rule import BetweenStepsRule


class Logging(BetweenStepsRule):
    """The run logs often, or logs images and histograms."""

    name = "logging"
    threshold = Threshold(share=0.05)
    verb = "is spent on"
    phrase = "logging"
    fix = "Log less often, and do not log images or histograms in every step"
