"""A schedule for a run as it is: in whole steps, and short enough."""

from collections.abc import Iterator
from typing import Any

from lflops.callback.bases import say
from lflops.callback.facts import accumulation_of, batches_left
from lflops.profile import Note
from lflops.schedule import Plan, Schedule

__all__ = ["planned"]


def planned(asked: Schedule, trainer: Any, pl_module: Any) -> tuple[Plan, list[Note]]:
    """The plan, and where it is not what was asked for, notes that say so, as the log does."""
    accumulation, batches = accumulation_of(trainer, pl_module), batches_left(trainer, pl_module)
    plan = Plan.of(asked, accumulation=accumulation, batches=batches)
    return plan, list(_notes(asked, plan, accumulation, batches))


def _notes(asked: Schedule, plan: Plan, accumulation: int, batches: float) -> Iterator[Note]:
    if any(getattr(asked, name) % accumulation for name in ("skip_first", "wait", "warmup", "active")):
        yield Note(code="rounded_to_cycles", subject="", values={"accumulation": accumulation})
        say(f"lflops: gradients are accumulated over {accumulation} batches, so the schedule is rounded up to whole steps of them")
    whole = Plan.of(asked, accumulation=accumulation)
    if plan.length < whole.length or (asked.repeat and plan.windows != whole.windows):
        left = {name: getattr(plan, name) for name in ("skip_first", "wait", "warmup", "active")} | {"windows": plan.windows or 0}
        yield Note(code="schedule_shrunk", subject="", values={"batches": int(batches), **left})
        said = ", ".join(f"{name} {number}" for name, number in left.items())
        say(f"lflops: {asked} does not fit into the run's {int(batches)} batches; what is left, in steps: {said}")
