"""The rule about growth of the process's memory during the run."""

from collections.abc import Iterator

from lflops import units
from lflops.findings.finding import Finding
from lflops.findings.rule import Threshold
from lflops.findings.run_rule import RunEvidence, RunRule
from lflops.ledger.account import memory_growth


class GrowingMemory(RunRule):
    """The process uses more main memory in each quarter of the run than in the quarter before."""

    name = "memory"
    threshold = Threshold(share=0.0)
    fix = (
        "Look for objects that are kept from step to step, such as losses with their autograd "
        "graphs, or a list of outputs"
    )

    def findings(self, run: RunEvidence) -> Iterator[Finding]:
        growth = memory_growth(run.ledger)
        if growth is not None:
            said = f"The host memory of the process grows by {units.size(growth)} per hour."
            yield Finding(cause=self.name, sentence=said, of="run", fix=self.fix, is_issue=True)
