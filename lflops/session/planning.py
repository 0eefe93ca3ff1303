"""Fits a schedule to a run: in whole steps, and short enough."""

from collections.abc import Callable, Iterator

from lflops.profile.notes import Note
from lflops.schedule import Plan, Schedule
from lflops.session.inputs.training import Stage

__all__ = ["planned"]


def planned(asked: Schedule, stage: Stage, say: Callable[[str], None], *, traced: bool) -> tuple[Plan, list[Note]]:
    """The plan, and where it is not what was asked for, notes that say so, as the log does."""
    accumulation, batches = stage.accumulation(), stage.batches_left
    plan = Plan.of(asked, accumulation=accumulation, batches=batches, traced=traced)
    return plan, list(_notes(asked, plan, accumulation, batches, say))


def _notes(asked: Schedule, plan: Plan, accumulation: int, batches: float, say: Callable[[str], None]) -> Iterator[Note]:
    if any(getattr(asked, name) % accumulation for name in ("skip_first", "wait", "warmup", "active")):
        yield Note(code="rounded_to_cycles", subject="", values={"accumulation": accumulation})
        say(f"lflops: gradients are accumulated over {accumulation} batches, so the schedule is rounded up to whole steps of them")
    whole = Plan.of(asked, accumulation=accumulation, traced=plan.traced)
    if plan.length < whole.length or (asked.repeat and plan.windows != whole.windows):
        left = {name: getattr(plan, name) for name in ("skip_first", "wait", "warmup", "active")} | {"windows": plan.windows or 0}
        yield Note(code="schedule_shrunk", subject="", values={"batches": int(batches), **left})
        said = ", ".join(f"{name} {number}" for name, number in left.items())
        run = "1 batch" if batches == 1 else f"{int(batches)} batches"
        say(f"lflops: {asked} does not fit into the run's {run}; shortened to these steps: {said}")
