"""Test the time account of one process, with marks at moments that the test chooses.

The account must add up to the nanosecond, whatever happens.
"""

from collections import deque
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lflops.ledger.account import CATEGORIES, CAUSES, SlowStep, percentile
from lflops.ledger.accountant import StepAccountant
from lflops.ledger.marks import CategoryMarks, EventQueue, StepCounters
from lflops.ledger.slow_step_causes import Evidence, StepSpent, _excess
from lflops.phase_log import BATCH, BEGIN, COUNTERS, STEP_END
from tests.support.phase_events import Events

MS = 1_000_000


class Training:
    """A training run on a clock that the test advances.

    Attributes:
        now: The moment in nanoseconds.
        collections: The moments at which garbage collections began and ended, alternately.
        faults: Number of memory pages that were read from disk.
        system: Seconds in which the training thread ran in the operating system's kernel.
        retries: Number of times that the device's allocator has tried again.
        book: The account under test.
        done: Number of steps that have ended.
        ran: Nanoseconds that the training thread has run on a core.
        waited: Nanoseconds that the training thread has waited for a core.
        spent: Nanoseconds that `read` has returned so far.
    """

    def __init__(self) -> None:
        self.now = 0
        self.collections: deque[int] = deque()
        self.faults = 0
        self.system = 0.0
        self.retries = 0
        self.events = Events(lambda: self.now)
        self.queue = EventQueue()
        self.events.log.connect(self.queue)
        self.marks = CategoryMarks()
        self.book = StepAccountant(0, self.collections, lambda: self.retries)
        self.done = 0
        self.ran = 0
        self.waited = 0
        self.spent = 0

    def spend(self, milliseconds: float) -> None:
        """Let time pass."""
        self.now += int(milliseconds * MS)

    def phase(self, name: str, milliseconds: float) -> None:
        """Run one phase of a step."""
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
        """Run a step; by default, it takes 6 ms."""
        self.phase("data", data)
        self.phase("forward", forward)
        self.spend(other)
        self.end_step(elements, touched=touched)

    def end_step(self, elements: int = 64, *, touched: bool = False) -> None:
        """End a step. Its counters are the attributes of this object."""
        self.done += 1
        usage = SimpleNamespace(ru_majflt=self.faults, ru_stime=self.system)
        schedule = f"{self.ran} {self.waited} 0".encode()
        shapes = (("x",), ((elements,),))
        self.events.log.append((self.ran, COUNTERS, schedule, usage))
        self.events.log.append((self.now, BATCH, shapes, touched))
        self.events.log.append((self.now, STEP_END, self, self.done))

    def look(self) -> None:
        """Assign all time until now to categories."""
        self.events.log.deliver()
        self.book.read(self.marks.of(self.queue.pop(), self), self.now)

    def read(self) -> tuple[dict[str, int], list[SlowStep]]:
        """Assign all time until now, and check that the account covers it to the nanosecond.

        Returns the milliseconds by category and the slow steps since the last call.
        """
        self.look()
        spent, slow = self.book.take()
        self.spent += sum(spent.values())
        assert self.now == self.spent + sum(self.book.open.values())
        return {name: value // MS for name, value in spent.items()}, slow

    def trained(self) -> "Training":
        """Run a start-up of 500 ms and twenty usual steps, and return this object.

        The first two steps are warm-up.
        """
        self.spend(500)
        for _ in range(20):
            self.step()
        return self


def test_every_phase_of_a_calm_training_has_its_time() -> None:
    """Without slow steps, every phase has the time that was spent in it.

    The first two steps of 6 ms are the warm-up. Each of the other 18 steps has 1 ms of data, 4 ms
    of forward and 1 ms outside all phases.
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
    """The time of the running step is in `open` before the step ends."""
    training = Training().trained()
    training.events.enter("data")
    training.spend(47_000)
    training.read()
    assert {"training/data": 47_000 * MS} == training.book.open


def test_what_belonged_to_a_category_is_moved_there() -> None:
    """A `move` event takes time from a phase, even if this time has already been read.

    30 of the 31 ms of data belonged to a validation, which then continues for 100 ms.
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
    """The time of an inner category is not part of the outer category.

    A checkpoint of 30 ms is saved during a validation of 100 ms. Both happen during a step, whose
    phases do not include them.
    """
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
    # 70 ms are more than a step may take longer than usual. 30 ms are not, so the checkpoint is no
    # cause of a slow step.
    assert ["validation"] == [each.cause for each in slow]


def slow_step(training: Training, **step: Any) -> tuple[dict[str, int], SlowStep]:
    """Run one more step, which must be the only slow one.

    Returns the milliseconds by category and the slow step.
    """
    training.step(**step)
    spent, (slow,) = training.read()
    assert slow.cause in CAUSES
    return spent, slow


def test_the_cost_of_a_slow_step_is_taken_out_of_its_phase() -> None:
    """The extra time of a slow step is moved from its phase to the category of its cause.

    The step has 201 ms of data instead of 1 ms. 200 ms are a wait for the loader, and the rest is a
    usual step. It is step 20, and ends at 500 + 20 × 6 + 206 ms.
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
    """If the garbage collector ran for 290 of 304 ms in forward, the cause is `gc`."""
    training = Training().trained()
    training.collections += [training.now + 5 * MS, training.now + 295 * MS]
    spent, slow = slow_step(training, forward=304)
    assert ("gc", "gc", 300) == (slow.cause, slow.phase, spent["slow/gc"])


def test_garbage_that_is_collected_in_each_step_has_its_own_part() -> None:
    """Collections in every step make no step slow; their time has the category `gc`.

    They take 2 of the 4 ms of forward in each of 20 steps, two of which are the warm-up, and in one
    more step. In that step, the account is read in the middle of the collection.
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
    """A collection of 290 ms during the start-up is no cause of a slow step."""
    training = Training()
    training.collections += [0, 290 * MS]
    _, slow = slow_step(training.trained(), forward=304)
    assert "unknown" == slow.cause


def test_a_thread_that_waited_for_a_core_explains_a_step() -> None:
    """If the thread waited for a core for 250 of 300 extra ms, the cause is `not_scheduled`."""
    training = Training().trained()
    training.waited += 250 * MS
    assert "not_scheduled" == slow_step(training, forward=304)[1].cause


def test_a_process_that_was_stopped_explains_a_step() -> None:
    """If no thread of the process ran for 280 ms (a freeze), the cause is `not_scheduled`."""
    training = Training().trained()
    training.book.freezes.append((training.now + 10 * MS, training.now + 290 * MS))
    assert "not_scheduled" == slow_step(training, data=301)[1].cause


def test_pages_from_disk_explain_a_step_that_did_not_compute() -> None:
    """500 memory pages from disk explain a slow step if its thread hardly computed.

    The thread was on a core for 10 ms, or for 250 ms of which it spent 240 ms in the system. If it
    computed for all of the 250 ms, the cause is another one.
    """
    for ran, in_system, cause in ((10, 0.0, "swap"), (250, 0.24, "swap"), (250, 0.0, "unknown")):
        training = Training().trained()
        training.faults = 500
        training.system = in_system
        training.ran = ran * MS
        assert cause == slow_step(training, forward=304)[1].cause


def test_an_allocator_that_tried_again_explains_a_step() -> None:
    """If the CUDA allocator tried again, it is the cause, whatever phase took longer."""
    training = Training().trained()
    training.read()
    training.retries = 1
    training.step(forward=304)
    assert ["allocator_retry"] == [each.cause for each in training.read()[1]]


def test_a_larger_batch_explains_a_step_and_is_soon_usual() -> None:
    """The cause `larger_batch` applies until there are enough steps of the new batch size.

    A batch with eight times the elements takes 200 ms longer. After eight such steps, this time is
    usual for the size. A step that takes another 200 ms longer is slow for an unknown reason.
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
    """If steps take between 6 and 60 ms, a step of 92 ms is not slow."""
    training = Training()
    for each in range(60):
        training.step(forward=4 + each * 7 % 55)
    training.step(forward=90)
    assert [] == training.read()[1]


def test_what_lflops_adds_to_a_step_is_its_own() -> None:
    """A counting step takes 306 ms instead of 6 ms; the other 300 ms have the category `lflops`."""
    training = Training().trained()
    training.step(forward=304, touched=True)
    spent, slow = training.read()
    assert (300, 76) == (spent["lflops"], spent["training/forward"])
    assert [] == slow


def test_between_epochs_begins_with_the_wait_for_the_loaders_end() -> None:
    """At the end of an epoch, the loop waits 3 ms for a batch, and the loader has none left.

    This wait is training time, but part of no step, so no step is slow. The first step of the next
    epoch begins when its batch is fetched.
    """
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


def test_callbacks_after_the_only_step_of_an_epoch_are_part_of_the_next_step() -> None:
    """In each epoch of one batch, callbacks run for 30 ms after lflops has logged the end of the step.

    Each step but the first takes 30 ms of these callbacks and its own 6 ms. Without them, the
    ledger would report steps of 6 ms.
    """
    training = Training()
    training.events.rest("between_epochs")
    for _ in range(20):
        training.step()
        training.spend(30)
        training.events.rest("between_epochs")
        training.spend(5)
    training.read()
    groups, _ = training.book.take_steps()
    unprofiled = [group for group in groups if group.mode == "unprofiled"]
    assert {0.031} == {round(group.spent["other"], 9) for group in unprofiled}
    assert {0.036} == {round(group.longest, 9) for group in unprofiled}


def test_logging_in_each_step_is_a_phase_of_the_step() -> None:
    """A loop logs for 30 ms in each step, so a step takes 36 ms. Logging after an epoch is not in it."""
    training = Training()
    for _ in range(20):
        training.phase("data", 1)
        training.phase("forward", 4)
        training.events.enter_activity("logging")
        training.spend(30)
        training.events.leave()
        training.spend(1)
        training.end_step()
    training.events.rest("between_epochs")
    training.events.enter_activity("logging")
    training.spend(500)
    training.events.leave()
    training.step()
    training.events.rest("after_run")
    spent, slow = training.read()
    groups, _ = training.book.take_steps()
    unprofiled = [group for group in groups if group.mode == "unprofiled"]
    assert {0.03} == {group.spent["logging"] for group in unprofiled[:-1]}
    assert {0.036} == {round(group.longest, 9) for group in unprofiled[:-1]}
    assert 0.006 == round(unprofiled[-1].longest, 9)
    # The first two steps are warm-up.
    assert 18 * 30 + 500 == spent["logging"]
    assert [] == slow


def test_a_step_that_logs_for_long_is_slow_because_of_logging() -> None:
    """One step of 6 ms logs for 200 ms. The ledger assigns this time to the category `logging`."""
    training = Training().trained()
    training.phase("forward", 4)
    training.events.enter_activity("logging")
    training.spend(200)
    training.events.leave()
    training.spend(2)
    training.end_step()
    spent, slow = training.read()
    assert ["logging"] == [step.cause for step in slow]
    assert 200 == pytest.approx(spent["logging"], abs=1)
    # The rest of the loop took a millisecond longer than usual.
    assert spent["slow/logging"] <= 1


def test_nested_logging_is_a_part_of_the_step() -> None:
    """A logger logs by another method that is logging as well: 30 ms of a step of 36 ms."""
    training = Training().trained()
    training.phase("data", 1)
    training.phase("forward", 4)
    training.events.enter_activity("logging")
    training.events.enter_activity("logging")
    training.spend(30)
    training.events.leave()
    training.events.leave()
    training.spend(1)
    training.end_step()
    training.read()
    groups, _ = training.book.take_steps()
    assert 0.036 == round(groups[-1].longest, 9)


def test_logging_within_a_validation_is_no_part_of_a_step() -> None:
    """Each step takes 6 ms. A validation of 50 ms between two steps logs for 40 ms of them."""
    training = Training().trained()
    training.events.enter_activity("validation")
    training.spend(10)
    training.events.enter_activity("logging")
    training.spend(40)
    training.events.leave()
    training.events.leave()
    training.step()
    spent, _ = training.read()
    groups, _ = training.book.take_steps()
    assert {0.006} == {round(group.longest, 9) for group in groups}
    assert (10, 40) == (spent["validation"], spent["logging"])


def test_logging_in_a_profiled_step_is_not_lflops() -> None:
    """A step that lflops counts takes 100 ms of forward and logs for 300 ms."""
    training = Training().trained()
    training.phase("data", 1)
    training.phase("forward", 100)
    training.events.enter_activity("logging")
    training.spend(300)
    training.events.leave()
    training.spend(1)
    training.end_step(touched=True)
    spent, _ = training.read()
    assert (300, 96) == (spent["logging"], spent["lflops"])


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
    """Whatever the order of events, each nanosecond belongs to one category; no time is negative.

    The events may include ends without beginnings.
    """
    training = Training()
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
    """A mark that is older than the last read corrects the account.

    The ledger's thread read the account at 100 ms, before the training thread appended its mark of
    99 ms. So the last of the 100 ms is moved from start-up to validation.
    """
    training = Training()
    training.spend(100)
    training.look()
    training.events.log.append((99 * MS, BEGIN, "validation", None))
    training.spend(1)
    assert ({"start_up": 99, "validation": 2}, []) == training.read()


def test_what_is_lost_is_all_but_training_and_warm_up() -> None:
    """Lost time is the time of all categories except training and warm-up.

    The start-up takes 10 ms, and thirty steps take 6 ms each. The next step takes 200 ms in data
    instead of 1 ms, so 199 ms more are lost, which is 209 ms in all. `take` is called before and
    after this step.
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
    """The cost of a slow step is divided among its phases; no phase gets more than its duration.

    The cost may exceed the extra time of all phases together, because the medians of the phases do
    not add up to the median of the step.
    """
    usual = draw.draw(st.dictionaries(st.sampled_from(sorted(phases)), st.integers(0, 10**6)))
    cost = draw.draw(st.integers(0, sum(phases.values())))
    step = StepSpent(phases, sum(phases.values()), Evidence(), None)
    recent = SimpleNamespace(usual_phases=usual)
    taken = _excess(step, recent, cost)  # type: ignore[arg-type]
    assert cost == sum(taken.values())
    assert all(0 <= spent <= phases[phase] for phase, spent in taken.items())


def test_what_a_phase_cannot_give_the_longest_one_does() -> None:
    """A part of the cost that exceeds the duration of a phase goes to the longest share.

    Forward took 50 ns longer than usual and the garbage collector 60 ns, but the step took 500 ns
    longer. By proportion, the collector would get 272 ns, but it only took 60 ns.
    """
    step = StepSpent({"forward": 950, "gc": 60, "other": 1000}, 2010, Evidence(), None)
    usual = SimpleNamespace(usual_phases={"forward": 900, "other": 1000})
    assert {"forward": 440, "gc": 60} == _excess(step, usual, 500)  # type: ignore[arg-type]


def test_the_system_is_asked_when_the_thread_was_off_its_core() -> None:
    """The scheduler counters are read again only after 2 ms in which the thread was off its core.

    Otherwise the thread cannot have waited for a core for long. Reading the counters takes as long
    as logging all other events of a step.
    """
    now = 1000 * MS
    asked = list[int]()

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
    """Each step is kept with its mode, its phases and the categories before it.

    The run has two warm-up steps, a usual step, a validation of 30 ms and a profiled step. The
    histogram of durations has only the usual step, which takes 6 ms, with an accuracy of 0.5 %.
    """
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
    """A thousand steps of 6 ms become at most 64 groups that still add up to 6 s.

    The histogram of durations has all steps except the two of the warm-up.
    """
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
