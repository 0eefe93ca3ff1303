"""The rule about padding in batches of sequences."""

import statistics
from collections.abc import Iterable, Sequence

from lflops.findings.evidence import StepEvidence
from lflops.findings.rule import Candidate, Facts, StepRule, Threshold
from lflops.profile.notes import notes_with


class Padding(StepRule):
    """A large share of each batch is padding, which the model computes as well.

    The cost is the time that forward and backward spend on padding. lflops reports this if at least
    30 % of the positions are padding. To detect padding, lflops uses a padding mask in the batch.
    Without a mask, the end of a sequence counts as padding if it repeats one value.
    """

    name = "padding"
    threshold = Threshold(share=0.10)
    sentence = (
        "{padding:percent} of a batch is padding, which the model processes like other input: "
        "this costs {cost}."
    )
    fix = (
        "Put sequences of about the same length into a batch and pad to the longest of them, or "
        "pack several sequences into a row"
    )

    def detect(self, step: StepEvidence, earlier: Sequence[Candidate]) -> Iterable[Candidate]:
        notes = notes_with("padding", step.profile.notes)
        shares_of_ranks = [float(note.values["share"]) for note in notes]
        if shares_of_ranks:
            share = statistics.mean(shares_of_ranks)
            facts: Facts = {"padding": share}
            yield Candidate(rule=self, seconds=share * step.pass_seconds, facts=facts)
