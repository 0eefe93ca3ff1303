"""A schedule for a run as it is: in whole steps, and short enough."""

from collections.abc import Iterator
from typing import Any

from lflops.lightning.trainer.compat import say
from lflops.lightning.trainer.facts import accumulation_of, batches_left
from lflops.lightning.trainer.stages import Stage
from lflops.profile.notes import Note
from lflops.schedule import Plan, Schedule

__all__ = ["planned"]


def planned(asked: Schedule, stage: Stage, trainer: Any, pl_module: Any, *, traced: bool) -> tuple[Plan, list[Note]]:
    """The plan, and where it is not what was asked for, notes that say so, as the log does."""
    accumulation = accumulation_of(trainer, pl_module) if stage.learns else 1
    batches = batches_left(trainer, pl_module) if stage.learns else stage.batches_left(trainer)
    plan = Plan.of(asked, accumulation=accumulation, batches=batches, traced=traced)
    return plan, list(_notes(asked, plan, accumulation, batches))


def _notes(asked: Schedule, plan: Plan, accumulation: int, batches: float) -> Iterator[Note]:
    if any(getattr(asked, name) % accumulation for name in ("skip_first", "wait", "warmup", "active")):
        yield Note(code="rounded_to_cycles", subject="", values={"accumulation": accumulation})
        say(f"lflops: gradients are accumulated over {accumulation} batches, so the schedule is rounded up to whole steps of them")
    whole = Plan.of(asked, accumulation=accumulation, traced=plan.traced)
    if plan.length < whole.length or (asked.repeat and plan.windows != whole.windows):
        left = {name: getattr(plan, name) for name in ("skip_first", "wait", "warmup", "active")} | {"windows": plan.windows or 0}
        yield Note(code="schedule_shrunk", subject="", values={"batches": int(batches), **left})
        said = ", ".join(f"{name} {number}" for name, number in left.items())
        say(f"lflops: {asked} does not fit into the run's {int(batches)} batches; what is left, in steps: {said}")
