"""One reason why a step or a run takes longer, with its cost and what to do about it."""

from typing import Literal

from msgspec import Struct


class Finding(Struct, frozen=True, kw_only=True):
    """One reason why a step or a run takes longer, in words.

    Attributes:
        cause: The name of the rule that found it.
        sentence: A sentence that names the reason and its cost.
        module: The module that it is in. Empty if it is in no particular module.
        rank: The slow rank, if the rule is about a rank.
        phase: The phase that this rank is slow in.
        seconds: The cost in seconds per step, or `None` if unknown.
        share: The cost as a share of the step. If `of` is "run", a share of the time from the end
            of start-up to the end of training.
        of: "step" for a typical step of the profiled window, "run" for the whole run, including the
            time between steps.
        fix: How to reduce the cost. Empty if there is no general advice.
        is_issue: Whether this is an issue to fix. Otherwise it only says where the time goes, and
            any training run spends time there.
        right: How often this finding was correctly the first one and how often it was the first
            one at all, in training runs on a CPU with known issues. `None` if not measured.
    """

    cause: str
    sentence: str
    module: str = ""
    rank: int | None = None
    phase: str = ""
    seconds: float | None = None
    share: float | None = None
    of: Literal["step", "run"] = "step"
    fix: str = ""
    is_issue: bool = False
    right: tuple[int, int] | None = None
