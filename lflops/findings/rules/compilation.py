"""The rule about repeated compilation."""

from msgspec.structs import replace

from lflops import units
from lflops.findings.finding import Finding
from lflops.findings.rule import Threshold
from lflops.findings.run_rule import RunEvidence, RunRule


class Compilation(RunRule):
    """The run compiles code with torch.compile again and again, in many steps."""

    name = "compilation"
    threshold = Threshold(share=0.05)
    verb = "is spent on"
    phrase = "compilation"
    fix = "Pad inputs to a few fixed shapes, or pass dynamic=True to torch.compile"

    def is_confirmed(self, run: RunEvidence) -> bool:
        return run.recompiles

    def finding(self, seconds: float, run: RunEvidence, *, is_issue: bool) -> Finding:
        """Make a finding. Compilation at the beginning of the run is no cost of each step."""
        found = super().finding(seconds, run, is_issue=is_issue)
        if run.recompiles:
            return found
        sentence = (
            f"{units.percent(found.share)} of the training loop's time "
            f"({units.duration(seconds)} in total) is spent on compilation at the beginning. In a "
            "longer run, this share is lower."
        )
        return replace(found, sentence=sentence, fix="", is_overhead=False)
