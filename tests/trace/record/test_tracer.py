"""Test to which modules the events of Kineto belong.

The tests record real traces on the CPU, and add a kernel of one microsecond for every matmul.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

import lflops
from lflops.model.module_tree import ModuleTree
from lflops.torch_private.modules import compilations
from lflops.trace.record.events import MAX_TABLE_ROWS, AttributedTrace, join, read
from lflops.trace.record.module_log import ModuleLog
from lflops.trace.record.tracer import Tracer, recorded_events
from lflops.trace.recorded import DeviceEvent, RecordedTrace
from tests.support.installed import installed
from tests.support.process_state import differences, global_hooks, settings, settle
from tests.support.small_models import Block, Projections, hidden, sequence

KERNEL = 1000
PRODUCTS = {"aten::mm", "aten::addmm"}


def with_kernels(trace: RecordedTrace) -> RecordedTrace:
    """Return the trace with a kernel for each matmul."""
    kernels = []
    for call in trace.operators:
        if call.name in PRODUCTS:
            kernel = DeviceEvent(
                "kernel",
                "gemm",
                0,
                1,
                call.end,
                call.end + KERNEL,
                10**9 + call.external,
                call.external,
            )
            kernels.append(kernel)
    return replace(trace, work=tuple(kernels))


def traced(model: nn.Module, *steps: Callable[[], Any]) -> AttributedTrace:
    """Run the steps under Kineto, and assign the recorded events to modules."""
    tree = ModuleTree({"": model})
    boundaries = ModuleLog(tree)
    with profile(activities=[ProfilerActivity.CPU]) as recorder, installed(boundaries):
        for number, step in enumerate(steps):
            with record_function(f"ProfilerStep#{number}"):
                boundaries.step()
                step()
    trace = with_kernels(read(recorded_events(recorder), device=True, stack=False))
    return join(trace, boundaries.threads, boundaries.home, tree)


def products(joined: AttributedTrace, step: int = 0) -> dict[str, dict[str, int]]:
    """Return by phase how many matmuls each module itself has launched in a step."""
    found: dict[str, dict[str, int]] = {}
    for (row, phase), nanoseconds in joined.device[step].items():
        found.setdefault(phase, {})[row] = nanoseconds // KERNEL
    return found


def train(model: nn.Module, *args: Tensor) -> None:
    """Run forward and backward."""
    model(*args).sum().backward()


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(hidden, hidden)
        self.block = Block()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.stem(x), use_reentrant=self.reentrant)


class Twice(nn.Module):
    """A layer that is shared by two parts, so that it has a name in each of them."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(hidden, hidden)
        self.a = nn.Sequential(shared)
        self.b = nn.Sequential(nn.ReLU(), shared)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Scoped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        with lflops.scope("loss"):
            return F.linear(self.body(x), self.body.weight)


def test_queries_keys_and_values_of_one_input_get_equal_shares() -> None:
    """Three layers on the same input each have their own matmuls.

    Each has one matmul in forward and two in backward, for its weight and its input. The stem has
    one in backward, because its input needs no gradient.
    """
    model = Projections()
    joined = traced(model, partial(train, model, sequence()))
    assert {"stem": 1, "q": 1, "k": 1, "v": 1} == products(joined)["forward"]
    assert {"stem": 1, "q": 2, "k": 2, "v": 2} == products(joined)["backward"]


def test_backward_is_forward_reversed() -> None:
    """Backward runs the modules of q(x) + k(x) + v(x) in reverse order.

    The two additions belong to the root.
    """
    model = Projections()
    joined = traced(model, partial(train, model, sequence()))
    assert ["", "v", "", "k", "q", "stem"] == [
        call.fqn for call in joined.calls if call.phase == "backward"
    ]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_runs_again_is_recompute(reentrant: bool) -> None:
    """The matmuls that a checkpoint runs again are recompute, whether it is reentrant or not.

    The gradients of both layers of the block belong to backward of these layers.
    """
    model = Checkpointed(reentrant=reentrant)
    found = products(traced(model, partial(train, model, sequence(requires_grad=True))))
    assert {"stem": 1, "block.up": 1, "block.down": 1} == found["forward"]
    assert {"stem": 2, "block.up": 2, "block.down": 2} == found["backward"]
    assert {"block.up": 1, "block.down": 1} == found["recompute"]


def test_a_shared_module_is_a_row_under_each_caller() -> None:
    """A shared module has separate work under each of its names.

    Each call has one matmul in forward. In backward, the second call has two, and the first has
    one, because its input needs no gradient.
    """
    model = Twice()
    found = products(traced(model, partial(train, model, sequence())))
    assert {"a.0": 1, "b.1": 1} == found["forward"]
    assert {"a.0": 1, "b.1": 2} == found["backward"]


def test_a_named_part_is_a_row_of_its_own() -> None:
    """The work in a named scope belongs to the scope, but not the work of modules called in it."""
    model = Scoped()
    found = products(traced(model, partial(train, model, sequence())))
    assert {"body": 1, "loss": 1} == found["forward"]
    assert {"body": 1, "loss": 2} == found["backward"]


class Product(torch.optim.SGD):
    """An optimizer whose step is one matmul. If there is a closure, it runs before the matmul."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        torch.ones(2, 2) @ torch.ones(2, 2)


@pytest.mark.parametrize("in_closure", [False, True])
def test_an_optimizer_step_is_its_own_but_for_its_closure(in_closure: bool) -> None:
    """The work of an optimizer step belongs to `optimizer`, without the work of its closure.

    A matmul after backward, such as for clipping, belongs to `other`.
    """
    model = nn.Sequential(nn.Linear(hidden, hidden))
    optimizer = Product(model.parameters(), lr=0.1)

    def compute() -> None:
        train(model, sequence())
        torch.ones(2, 2) @ torch.ones(2, 2)

    def step() -> None:
        if not in_closure:
            compute()
        optimizer.step(compute if in_closure else None)

    expected = {"forward": {"0": 1}, "backward": {"0": 1}, "other": {"": 1}, "optimizer": {"": 1}}
    assert expected == products(traced(model, step))


def test_outside_of_modules_it_is_forward_once_one_was_called() -> None:
    """Work outside modules is `other` before the first module is called, and `forward` after it."""
    model = nn.Sequential(nn.Linear(hidden, hidden))

    def step() -> None:
        torch.ones(2, 2) @ torch.ones(2, 2)
        model(sequence())
        torch.ones(2, 2) @ torch.ones(2, 2)

    assert {"other": {"": 1}, "forward": {"0": 1, "": 1}} == products(traced(model, step))


def test_each_step_has_its_own() -> None:
    """Each step has its own work, although autograd nodes have similar numbers in both steps.

    The first step trains on one batch, and the second on two.
    """
    model = Projections()

    def twice() -> None:
        train(model, sequence())
        train(model, sequence())

    joined = traced(model, partial(train, model, sequence()), twice)
    assert [2, 4] == [products(joined, step)["backward"]["q"] for step in range(2)]


def test_a_module_left_by_an_exception_is_left() -> None:
    """After a module has raised an exception, later work does not belong to it."""

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("left")

    model = nn.ModuleDict({"fails": Fails(), "works": nn.Linear(hidden, hidden)})

    def step() -> None:
        with pytest.raises(ValueError, match="left"):
            model["fails"](sequence())
        train(model["works"], sequence())

    assert {"works": 1} == products(traced(model, step))["forward"]


def test_a_compiled_module_stays_compiled_and_has_its_work() -> None:
    """A compiled module is not compiled again, and has all the work of its submodules.

    The wrapper and the module that it wraps are one call.
    """
    body = torch.compile(nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU()), backend="aot_eager")
    model = nn.ModuleList([body, nn.Linear(hidden, hidden)])

    def step() -> None:
        model[1](model[0](sequence())).sum().backward()

    step()
    before = compilations()
    joined = traced(model, step)
    step()
    assert before == compilations()
    assert {"forward": {"0": 1, "1": 1}, "backward": {"0": 1, "1": 2}} == products(joined)
    assert ["0", "1"] == [call.fqn for call in joined.calls if call.phase == "forward"]


def test_inference_mode_is_no_obstacle() -> None:
    """In inference mode, work is assigned by time, because there are no autograd nodes."""
    model = Projections()

    def step() -> None:
        with torch.inference_mode():
            model(sequence())

    assert {"forward": {"stem": 1, "q": 1, "k": 1, "v": 1}} == products(traced(model, step))


@pytest.mark.parametrize("ending", ["stop", "abandon"])
def test_a_recording_leaves_no_trace_but_the_trace(ending: str, tmp_path: Path) -> None:
    """After a recording, no hook, filter, setting or open file remains, however it ended."""
    model = Projections()
    x = sequence()
    train(model, x)
    settle()
    before = settings() | global_hooks()
    tracer = Tracer(ModuleTree({"": model}))
    assert tracer.begin()
    assert differences(before, settings() | global_hooks())
    train(model, x)
    if ending == "stop":
        tracer.stop(tmp_path, "host_0")
    else:
        tracer.abandon()
    assert [] == differences(before, settings() | global_hooks())


@pytest.mark.parametrize("stack", [False, True])
def test_the_table_is_that_of_key_averages(stack: bool) -> None:
    """The table of operators equals `key_averages()` in calls, total time and self time.

    Ranges that a user has named are no operators. The table has fewer than 100 operators, so none
    is left out.
    """
    model = Checkpointed(reentrant=True)
    with (
        profile(activities=[ProfilerActivity.CPU], with_stack=stack) as recorder,
        record_function("ProfilerStep#0"),
    ):
        for _ in range(3):
            train(model, sequence(requires_grad=True))
    trace = read(recorded_events(recorder), device=False, stack=stack)
    joined = join(trace, {}, 0, ModuleTree({"": model}))
    theirs = {each.key: each for each in recorder.key_averages() if not each.is_user_annotation}
    assert len(joined.operators) < MAX_TABLE_ROWS
    for ours in joined.operators:
        expected = theirs[ours.name]
        assert expected.count == ours.calls
        assert expected.cpu_time_total / 1e6 == pytest.approx(ours.host_seconds)
        assert expected.self_cpu_time_total / 1e6 == pytest.approx(ours.self_host_seconds)
    if not stack:
        operators = [each for each in theirs.values() if ".py(" not in each.key]
        most = sorted((each.self_cpu_time_total for each in operators), reverse=True)
        assert most == pytest.approx([each.self_host_seconds * 1e6 for each in joined.operators])


def test_modules_enclose_their_operators_in_the_same_clock() -> None:
    """Operators run between the beginning and the end of their module, on the same clock."""
    model = nn.Sequential(nn.Linear(hidden, hidden), nn.Linear(hidden, hidden))
    tree = ModuleTree({"": model})
    boundaries = ModuleLog(tree)
    with (
        profile(activities=[ProfilerActivity.CPU]) as recorder,
        installed(boundaries),
        record_function("ProfilerStep#0"),
    ):
        model(sequence())
    trace = read(recorded_events(recorder), device=False, stack=False)
    joined = join(trace, boundaries.threads, boundaries.home, tree)
    calls = {call.fqn: call for call in joined.calls}
    products = [event for event in trace.operators if event.name == "aten::linear"]
    for row, event in zip(["0", "1"], products, strict=True):
        assert calls[row].start < event.start < event.end < calls[row].end


def test_a_tracer_records_batches_and_steps(tmp_path: Path) -> None:
    """A tracer records four batches in two steps.

    Until the trace is annotated, its file has a name that no reader of traces looks for.
    """
    model = Projections()
    tracer = Tracer(ModuleTree({"": model}))
    assert tracer.warm_up()
    assert tracer.begin()
    for batch in range(4):
        with record_function(f"mine {batch}"):
            train(model, sequence())
        if batch < 3:
            tracer.step(whole=batch % 2 == 1)
    recording = tracer.stop(tmp_path / "window", "host.example_3")
    assert recording is not None
    assert 4 == recording.trace.batches
    assert recording.device_seconds is None
    assert recording.trace.device_idle_seconds is None
    assert recording.trace.exposed_comm_seconds is None
    assert Counter({"q": 4, "k": 4, "v": 4, "stem": 4, "": 4}) == Counter(
        call.fqn for call in recording.calls if call.phase == "forward"
    )
    assert [recording.raw] == list((tmp_path / "window").iterdir())
    assert recording.raw.name.startswith(".lflops-")
    assert recording.path.name.startswith("host-example_3.")
    assert recording.path.name.endswith(".pt.trace.json.gz")
    text = recording.raw.read_text()
    assert all(name in text for name in ("ProfilerStep#0", "ProfilerStep#3", "mine 2"))
    assert "ProfilerStep#4" not in text


def test_torch_makes_none_of_its_own_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While lflops traces, torch does not convert Kineto's events to its own event objects.

    This would take a hundred times as long as reading Kineto's events. Since torch 2.13, torch
    converts them more often with `acc_events=True`, which shows that the test can fail.
    """
    made: list[object] = []

    def parse(self: object, *_: Any, **__: Any) -> list[Any]:
        made.append(self)
        return []

    monkeypatch.setattr(torch.autograd.profiler.profile, "_parse_kineto_results", parse)

    def number(begin: Callable[[], object], stop: Callable[[], object]) -> int:
        made.clear()
        begin()
        torch.ones(2).sum()
        stop()
        return len(made)

    tracer = Tracer(ModuleTree({"": nn.Linear(1, 1)}))
    plain = profile(activities=[ProfilerActivity.CPU], acc_events=False)
    keeping = profile(activities=[ProfilerActivity.CPU], acc_events=True)
    expected = number(plain.start, plain.stop)
    assert expected == number(tracer.begin, lambda: tracer.stop(tmp_path, "host_0"))
    assert expected < number(keeping.start, keeping.stop) or expected == 1


def test_an_abandoned_tracer_can_begin_anew(tmp_path: Path) -> None:
    """After a recording was abandoned, a new recording contains nothing of it."""
    model = Projections()
    tracer = Tracer(ModuleTree({"": model}))
    assert tracer.begin()
    train(model, sequence())
    tracer.abandon()
    assert tracer.stop(tmp_path, "host_0") is None
    assert [] == list(tmp_path.iterdir())
    assert tracer.begin()
    train(model, sequence())
    recording = tracer.stop(tmp_path, "host_0")
    assert recording is not None
    assert 1 == recording.trace.batches


def test_where_nothing_can_be_recorded_the_tracer_says_so() -> None:
    """On a CPU, a tracer that should record only a device refuses, and gives the reason."""
    tracer = Tracer(ModuleTree({"": Projections()}), torch.device("cpu"), activities=["device"])
    assert not tracer.begin()
    assert "no_activity" == tracer.refusal
