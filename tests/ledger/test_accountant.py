"""The account of one start, from marks at moments that the test chooses.

It adds up to the nanosecond, whatever happens.
"""

from collections import deque
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from hypothesis import given, strategies as st

from lflops.ledger.account import CATEGORIES, CAUSES, SlowStep, percentile
from lflops.ledger.accountant import Evidence, StepAccountant, StepSpent, _excess
from lflops.ledger.marks import CategoryMarks, EventQueue, StepCounters
from lflops.phase_log import BATCH, BEGIN, COUNTERS, STEP_END
from tests.support.phase_events import Events

MS = 1_000_000


class Training:
    """A training whose clock the test advances."""

    def __init__(self) -> None:
        self.now = 0
        self.collections: deque[int] = deque()
        self.faults, self.system, self.retries = 0, 0.0, 0
        self.events = Events(lambda: self.now)
        self.queue = EventQueue()
        self.events.log.connect(self.queue)
        self.marks = CategoryMarks()
        self.book = StepAccountant(0, self.collections, lambda: self.retries)
        self.done = 0
        self.ran, self.waited = 0, 0
        self.spent = 0

    def spend(self, milliseconds: float) -> None:
        """Let time pass."""
        self.now += int(milliseconds * MS)

    def phase(self, name: str, milliseconds: float) -> None:
        """A phase of a step."""
        self.events.enter(name)
        self.spend(milliseconds)
        self.events.leave()

    def step(
        self,
        *,
        data: float = 1,
        forward: float = 4,
        other: float = 1,
        elements: int = 64,
        touched: bool = False,
    ) -> None:
        """A step: 6 ms, if not said otherwise."""
        self.phase("data", data)
        self.phase("forward", forward)
        self.spend(other)
        self.end_step(elements, touched=touched)

    def end_step(self, elements: int = 64, *, touched: bool = False) -> None:
        """Its end."""
        self.done += 1
        usage = SimpleNamespace(ru_majflt=self.faults, ru_stime=self.system)
        schedule = f"{self.ran} {self.waited} 0".encode()
        shapes = (("x",), ((elements,),))
        self.events.log.append((self.ran, COUNTERS, schedule, usage))
        self.events.log.append((self.now, BATCH, shapes, touched))
        self.events.log.append((self.now, STEP_END, self, self.done))

    def look(self) -> None:
        """Account for all until now."""
        self.events.log.deliver()
        self.book.read(self.marks.of(self.queue.pop(), self), self.now)

    def read(self) -> tuple[dict[str, int], list[SlowStep]]:
        """Account for all until now; milliseconds by category, and the slow steps."""
        self.look()
        spent, slow = self.book.take()
        self.spent += sum(spent.values())
        assert self.now == self.spent + sum(self.book.open.values())
        return {name: value // MS for name, value in spent.items()}, slow

    def trained(self) -> "Training":
        """After twenty usual steps, the first two of them cold."""
        self.spend(500)
        for _ in range(20):
            self.step()
        return self


def test_every_phase_of_a_calm_training_has_its_time() -> None:
    """Two cold steps of 6 ms are the warm-up.

    The other 18 have 1 ms of data, 4 of forward and 1 of no phase each.
    """
    spent, slow = Training().trained().read()
    assert {
        "start_up": 500,
        "warm_up": 12,
        "training/data": 18,
        "training/forward": 72,
        "training/other": 18,
    } == spent
    assert [] == slow


def test_a_step_that_is_going_on_is_part_of_the_account() -> None:
    """And is again in the row in which it ends."""
    training = Training().trained()
    training.events.enter("data")
    training.spend(47_000)
    training.read()
    assert {"training/data": 47_000 * MS} == training.book.open


def test_what_belonged_to_a_category_is_moved_there() -> None:
    """Of a step's 31 ms of data, which were read before, 30 were a validation's.

    It goes on for 100.
    """
    training = Training().trained()
    training.phase("data", 31)
    training.read()
    training.events.begin("validation")
    training.events.move(30 * MS, "data", "validation")
    training.spend(100)
    training.events.end("validation")
    training.step(data=0)
    spent, slow = training.read()
    assert (130, 1) == (spent["validation"], spent["training/data"])
    assert [("validation", 0.13)] == [(each.cause, each.cost) for each in slow]


def test_what_is_within_a_category_is_taken_from_it() -> None:
    """A checkpoint of 30 ms in a validation of 100 ms; both in a step, which has none of it."""
    training = Training().trained()
    events = training.events
    events.begin("validation")
    training.spend(50)
    events.enter_activity("checkpoint_save")
    training.spend(30)
    events.leave()
    training.spend(20)
    events.end("validation")
    training.step()
    spent, slow = training.read()
    assert (70, 30) == (spent["validation"], spent["checkpoint_save"])
    assert 19 == spent["training/data"]
    assert ["validation"] == [
        each.cause for each in slow
    ]  # 70 ms are beyond what a step may take longer, and 30 ms are not


def slow_step(training: Training, **step: Any) -> tuple[dict[str, int], SlowStep]:
    """What a step becomes after the usual ones."""
    training.step(**step)
    spent, (slow,) = training.read()
    assert slow.cause in CAUSES
    return spent, slow


def test_the_cost_of_a_slow_step_is_taken_out_of_its_phase() -> None:
    """201 ms of data, where 1 ms is usual.

    200 ms wait for the loader, and the rest is a step as usual.
    """
    spent, slow = slow_step(Training().trained(), data=201)
    assert (200, 19, 76) == (
        spent["slow/loader"],
        spent["training/data"],
        spent["training/forward"],
    )
    expected = SlowStep(
        step=20, end=0.826, seconds=0.206, usual=0.006, cost=0.2, cause="loader", phase="data"
    )
    assert expected == slow


def test_garbage_that_was_collected_explains_a_step() -> None:
    """Of 300 ms in forward the collector had 290."""
    training = Training().trained()
    training.collections += [training.now + 5 * MS, training.now + 295 * MS]
    spent, slow = slow_step(training, forward=304)
    assert ("gc", "gc", 300) == (slow.cause, slow.phase, spent["slow/gc"])


def test_garbage_that_is_collected_in_each_step_has_its_own_part() -> None:
    """2 of the 4 ms of forward in each of 20 steps, the first of which are the warm-up.

    Of the last collection half is after the look.
    """
    training = Training()
    for _ in range(20):
        training.collections += [training.now + 2 * MS, training.now + 4 * MS]
        training.step()
    training.events.enter("forward")
    training.collections += [training.now + MS, training.now + 3 * MS]
    training.spend(2)
    training.look()
    assert {"training/forward": MS, "gc": MS} == training.book.open
    training.spend(2)
    training.events.leave()
    training.end_step()
    spent, slow = training.read()
    assert (18 * 2 + 2, 18 * 2 + 2, []) == (spent["training/forward"], spent["gc"], slow)


def test_collections_of_earlier_steps_explain_nothing() -> None:
    """One of 290 ms that ended before the step began, in the start-up."""
    training = Training()
    training.collections += [0, 290 * MS]
    _, slow = slow_step(training.trained(), forward=304)
    assert "unknown" == slow.cause


def test_a_thread_that_waited_for_a_core_explains_a_step() -> None:
    """250 of the 300 ms."""
    training = Training().trained()
    training.waited += 250 * MS
    assert "not_scheduled" == slow_step(training, forward=304)[1].cause


def test_a_process_that_was_stopped_explains_a_step() -> None:
    """No thread of it ran for 280 ms."""
    training = Training().trained()
    training.book.freezes.append((training.now + 10 * MS, training.now + 290 * MS))
    assert "not_scheduled" == slow_step(training, data=301)[1].cause


def test_pages_from_disk_explain_a_step_that_did_not_compute() -> None:
    """500 of them, and 10 ms on a core, or 250 ms, of which the system took 240.

    One that computed was slow for another reason.
    """
    for ran, in_system, cause in ((10, 0.0, "swap"), (250, 0.24, "swap"), (250, 0.0, "unknown")):
        training = Training().trained()
        training.faults, training.system, training.ran = 500, in_system, ran * MS
        assert cause == slow_step(training, forward=304)[1].cause


def test_an_allocator_that_tried_again_explains_a_step() -> None:
    """Whatever phase it was in."""
    training = Training().trained()
    training.read()
    training.retries = 1
    training.step(forward=304)
    assert ["allocator_retry"] == [each.cause for each in training.read()[1]]


def test_a_larger_batch_explains_a_step_and_is_soon_usual() -> None:
    """Eight times the elements, 200 ms longer.

    After eight of them that is usual for the size, and 200 ms more are not.
    """
    training = Training().trained()
    assert "larger_batch" == slow_step(training, forward=204, elements=512)[1].cause
    for _ in range(12):
        training.step(forward=204, elements=512)
    assert {"larger_batch"} == {each.cause for each in training.read()[1]}
    training.step(forward=204, elements=512)
    assert [] == training.read()[1]
    assert "unknown" == slow_step(training, forward=404, elements=512)[1].cause


def test_steps_that_vary_are_not_slow() -> None:
    """Between 6 and 60 ms: one of 90 ms is none to tell of."""
    training = Training()
    for each in range(60):
        training.step(forward=4 + each * 7 % 55)
    training.step(forward=90)
    assert [] == training.read()[1]


def test_what_lflops_adds_to_a_step_is_its_own() -> None:
    """A counted step of 306 ms: 300 of them."""
    training = Training().trained()
    training.step(forward=304, touched=True)
    spent, slow = training.read()
    assert (300, 76) == (spent["lflops"], spent["training/forward"])
    assert [] == slow


def test_between_epochs_begins_with_the_wait_for_the_loaders_end() -> None:
    """That wait is part of no step, and the next epoch's first step begins with its fetch."""
    training = Training().trained()
    training.phase("data", 3)
    training.events.rest("between_epochs")
    training.spend(70)
    training.step()
    training.events.rest("after_run")
    training.spend(10)
    spent, slow = training.read()
    assert (70, 18 + 3 + 1, 10) == (
        spent["between_epochs"],
        spent["training/data"],
        spent["after_run"],
    )
    assert [] == slow


EVENTS = st.one_of(
    st.tuples(
        st.sampled_from(["enter_activity", "enter", "begin"]),
        st.sampled_from([*CATEGORIES, "data", "forward", "wait"]),
    ),
    st.tuples(st.sampled_from(["leave", "drop", "step", "wait", "collect"]), st.just("")),
    st.tuples(st.just("rest"), st.sampled_from([*CATEGORIES])),
    st.tuples(st.just("end"), st.sampled_from([*CATEGORIES])),
    st.tuples(st.just("look"), st.just("")),
)


@given(st.lists(st.tuples(EVENTS, st.integers(0, 10**9)), max_size=80))
def test_any_order_of_events_adds_up(events: list[tuple[tuple[str, str], int]]) -> None:
    """Also ends without beginnings: every nanosecond is in one category, and none is negative."""
    training, spent = Training(), 0
    for (event, name), after in events:
        if event == "step":
            training.end_step()
        elif event == "look":
            training.look()
        elif event == "collect":
            training.collections += [training.now, training.now + after // 2]
        elif name:
            getattr(training.events, event)(name)
        else:
            getattr(training.events, event)()
        training.now += after
    training.look()
    taken, _ = training.book.take()
    spent = sum(taken.values()) + sum(training.book.open.values())
    assert training.now == spent
    assert all(value > 0 for value in taken.values())


def test_a_mark_that_comes_after_a_later_look_at_the_clock_moves_the_time_back() -> None:
    """The thread looked at 100 ms; the training's mark of 99 ms was not there yet."""
    training = Training()
    training.spend(100)
    training.look()
    training.events.log.append((99 * MS, BEGIN, "validation", None))
    training.spend(1)
    assert ({"start_up": 99, "validation": 2}, []) == training.read()


def test_what_is_lost_is_all_but_training_and_warm_up() -> None:
    """10 ms of start-up; thirty steps of 6 ms; then one with 200 ms in data, of which 199 are lost: 209 ms, one slow step.

    Taken twice.
    """
    training = Training()
    training.spend(10)
    for _ in range(30):
        training.step()
    training.look()
    training.book.take()
    assert (10 * MS, 0) == (training.book.lost, training.book.slow_steps)
    training.step(data=200)
    training.look()
    training.book.take()
    assert (209 * MS, 1) == (training.book.lost, training.book.slow_steps)


@given(
    st.dictionaries(
        st.sampled_from(["data", "forward", "backward", "gc"]), st.integers(1, 10**6), min_size=1
    ),
    st.data(),
)
def test_no_phase_of_a_step_gives_more_than_it_has(
    phases: dict[str, int], draw: st.DataObject
) -> None:
    """Medians of phases do not add up to that of the step, so a step can cost more than its phases took longer."""
    usual = draw.draw(st.dictionaries(st.sampled_from(sorted(phases)), st.integers(0, 10**6)))
    cost = draw.draw(st.integers(0, sum(phases.values())))
    taken = _excess(
        StepSpent(phases, sum(phases.values()), Evidence(), None),
        SimpleNamespace(usual_phases=usual),
        cost,
    )  # type: ignore[arg-type]
    assert cost == sum(taken.values())
    assert all(0 <= spent <= phases[phase] for phase, spent in taken.items())


def test_what_a_phase_cannot_give_the_longest_one_does() -> None:
    """50 ns of forward and 60 of the collector are beyond the usual, and the step is 500 longer.

    60 are all that the collector has.
    """
    step = StepSpent({"forward": 950, "gc": 60, "other": 1000}, 2010, Evidence(), None)
    usual = SimpleNamespace(usual_phases={"forward": 900, "other": 1000})
    assert {"forward": 440, "gc": 60} == _excess(step, usual, 500)  # type: ignore[arg-type]


def test_the_system_is_asked_when_the_thread_was_off_its_core() -> None:
    """For 2 ms since it was asked last: it cannot have waited for longer.

    To ask takes as long as all other marks of a step.
    """
    now, asked = 1000 * MS, list[int]()

    def schedule() -> bytes:
        asked.append(now // MS)
        return f"0 {now} 0".encode()

    counters = StepCounters(lambda: now, schedule)
    read = []
    for step, later in enumerate((0, 1, 0.5, 100, 0)):
        now += int(later * MS)
        read.append(counters.read(step))
    assert [1000, 1101] == asked
    ran, schedules, _ = zip(*read, strict=True)
    assert (b"0 1000000000 0",) * 3 + (b"0 1101500000 0",) * 2 == schedules
    assert all(first <= second for first, second in pairwise(ran))


def test_each_step_is_kept_with_its_phases_and_what_lies_before_it() -> None:
    """Two steps of the warm-up, a usual one, a validation of 30 ms and a step that is traced."""
    training = Training()
    for _ in range(3):
        training.step()
    training.events.begin("validation")
    training.spend(30)
    training.events.end("validation")
    training.step(data=3, touched=True)
    training.look()
    groups, durations = training.book.take_steps()
    assert [
        (0, "warm_up", {}),
        (1, "warm_up", {}),
        (2, "unprofiled", {}),
        (3, "profiled", {"validation": 0.030}),
    ] == [(group.first, group.mode, group.between) for group in groups]
    assert {"data": 0.003, "forward": 0.004, "other": 0.001} == groups[-1].spent
    median = percentile(durations, 0.5)
    assert median is not None
    assert abs(median - 0.006) <= 0.005 * 0.006
    assert ([], {}) == training.book.take_steps()


def test_many_steps_between_two_rows_become_groups_with_the_same_sums() -> None:
    """Of a thousand steps of 6 ms no second is lost, and at most 64 groups are kept."""
    training = Training()
    for _ in range(1000):
        training.step()
    training.look()
    groups, durations = training.book.take_steps()
    assert len(groups) <= 64
    assert 1000 == sum(group.steps for group in groups)
    assert 6.0 == round(sum(group.seconds for group in groups), 9)
    assert 998 == sum(durations.values())
    assert [group.last + 1 for group in groups[:-1]] == [group.first for group in groups[1:]]
