"""Test which modules hold the memory of a snapshot, according to a profile of the same run."""

import contextlib
import gc
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile as profiler, record_function
from torch.utils.checkpoint import checkpoint

import lflops
from lflops.cli.main import main
from lflops.errors import ProfileError
from lflops.memory.snapshots import modules
from lflops.memory.snapshots.modules import memory_by_module
from lflops.memory.snapshots.read import Snapshot, snapshot_of
from lflops.profile.profile import Moment, Profile
from lflops.profile.records import Phase
from tests.support.memory_snapshots import BACKWARD, BUILD, STATE, UPDATE, Recorder, forward, loss
from tests.support.quarters import exact
from tests.support.small_models import Block, hidden

WORDS, BLOCKS = 50, 3
PYTHON = {
    "forward": forward(30),
    "loss": loss(12),
    "backward": BACKWARD,
    "optimizer": UPDATE,
    "": [("/app/train.py", 9, "train")],
}
RECOMPUTED = [*forward(30), ("/venv/torch/utils/checkpoint.py", 5, "recompute_fn")]


class Words(nn.Module):
    """A model from token ids to logits, through equal blocks."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.words = nn.Embedding(WORDS, hidden)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(hidden, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.words(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def training(model: nn.Module, samples: int = 32) -> Callable[[Callable[[str], Any]], None]:
    """Return a function that runs a training step, with each part in a context of its name."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    ids = torch.randint(0, WORDS, (samples, 32), generator=torch.Generator().manual_seed(0))

    def step(part: Callable[[str], Any]) -> None:
        with part("forward"):
            logits = model(ids)
        with part("loss"):
            error = cross_entropy(logits.flatten(0, 1), ids.flatten())
        del logits
        with part("backward"):
            error.backward()
        with part("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    return step


def recorded(
    model: nn.Module, step: Callable[[Any], None], folder: Path
) -> tuple[Snapshot, dict[int, tuple[str, str | None]]]:
    """Run two steps; return a snapshot from the CPU allocator's events, and the truth for it.

    The truth is the part of the step and the module in which each allocation was made, by its
    position in the trace.
    """
    names = {module: name for name, module in model.named_modules()}
    open_ranges: list[Any] = []

    def enter(module: nn.Module, _: object) -> None:
        open_ranges.append(record_function(f"module {names[module]}"))
        open_ranges[-1].__enter__()

    def leave(*_: object) -> None:
        open_ranges.pop().__exit__(None, None, None)

    hooks = [module.register_forward_pre_hook(enter) for module in names]
    hooks += [module.register_forward_hook(leave, always_call=True) for module in names]
    gc.collect()
    with profiler(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        for _ in range(2):
            step(record_function)
    for hook in hooks:
        hook.remove()
    recording.export_chrome_trace(str(folder / "trace.json"))
    events = exact(folder / "trace.json")["traceEvents"]
    ranges = [
        (each["ts"], each["ts"] + each["dur"], each["name"]) for each in events if each["ph"] == "X"
    ]
    parts = [each for each in ranges if each[2] in PYTHON]
    calls = [each for each in ranges if each[2].startswith("module ")]
    memory_events = [each for each in events if each["name"] == "[memory]"]
    memory_events.sort(key=lambda each: each["ts"])
    recorder = Recorder()
    addresses: dict[int, int] = {}
    truth: dict[int, tuple[str, str | None]] = {}
    for event in memory_events:
        at = event["ts"]
        nbytes = event["args"]["Bytes"]
        address = event["args"]["Addr"]
        part = next((name for begin, end, name in parts if begin <= at <= end), "")
        running = [
            (end - begin, name.removeprefix("module "))
            for begin, end, name in calls
            if begin <= at <= end
        ]
        # The shortest call is the innermost.
        module = min(running)[1] if running else None
        if nbytes > 0:
            is_recomputed = part == "backward" and module
            stack = RECOMPUTED if is_recomputed else PYTHON[part]
            (addresses[address],) = recorder.allocate(nbytes, stack)
            truth[len(recorder.trace) - 1] = part, module
        elif address in addresses:
            recorder.free([addresses.pop(address)])
    return snapshot_of(recorder.snapshot()), truth


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_real_step_is_divided_as_its_hooks_divide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: bool
) -> None:
    """At least 95 % of a real step's bytes are matched, with the right module and phase.

    The events come from the CPU allocator, and hooks on the modules return the truth.
    """
    model = Words(checkpoints=checkpoints)
    step = training(model)
    step(lambda _: contextlib.nullcontext())
    with lflops.counting(model) as counted:
        step(lambda _: contextlib.nullcontext())
    snapshot, truth = recorded(model, step, tmp_path)
    given: dict[int, str] = {}
    moments = modules._moments

    def kept(*args: Any) -> Any:
        given.update(args[2])
        return moments(*args)

    monkeypatch.setattr(modules, "_moments", kept)
    monkeypatch.setattr(Profile, "patterns", lambda profile: {row: row for row in profile.modules})
    assert memory_by_module(snapshot, counted.profile).matched_share > 0.95
    assert set(given) == set(truth)
    found = {}
    for place, name in given.items():
        owner, separator, phase = name.partition(", made in ")
        if separator:
            found[place] = (owner, phase)
    for place, (owner, phase) in found.items():
        part, module = truth[place]
        # The loss is part of forward, and recomputation is part of backward.
        true_phase = "forward" if part == "loss" else part
        assert true_phase == ("backward" if phase == "recompute" else phase)
        if module is not None:
            assert owner == (module or "the model itself")
    in_optimizer = {place for place, (part, _) in truth.items() if part == "optimizer"}
    assert in_optimizer == {place for place, name in given.items() if name == "the optimizer"}
    assert checkpoints == ("recompute" in {phase for _, phase in found.values()})


MADE: tuple[tuple[str, Phase, int], ...] = (
    ("0", "forward", 400),
    ("1", "forward", 600),
    ("", "forward", 20),
    ("1", "backward", 300),
    ("0", "backward", 500),
    ("", "optimizer", 250),
)
"""The allocations of a step's operators: module, phase and bytes."""


@pytest.fixture
def profile() -> Profile:
    """Return a profile of two layers whose step allocates `MADE`."""
    found = lflops.count(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), torch.zeros(1, 2))
    assert found.memory is not None
    live = 1000
    nothing = found.memory.timeline[0].by_category
    timeline = []
    for index, (module, phase, nbytes) in enumerate(MADE):
        timeline.append(Moment("mm", module, phase, live, index, nothing, live + nbytes))
        live += nbytes
    return replace(found, memory=replace(found.memory, timeline=tuple(timeline)))


def step_of(recorder: Recorder) -> None:
    """Record the step of the profile.

    One operator has two results, and 8 bytes are not in the profile.
    """
    held = recorder.allocate(400, forward(1))
    held += recorder.allocate(8, forward(1))
    held += recorder.allocate(500, forward(2))
    held += recorder.allocate(100, forward(2))
    held += recorder.allocate(20, loss(3))
    recorder.allocate(300, BACKWARD)
    recorder.allocate(500, BACKWARD)
    recorder.free(held)
    recorder.allocate(200, STATE)
    recorder.free(recorder.allocate(50, UPDATE))


@pytest.fixture
def recorder() -> Recorder:
    """Return a recording of one step, with 1,000 bytes of parameters that are older than it."""
    recorder = Recorder()
    recorder.allocate(1000, BUILD)
    recorder.forget()
    step_of(recorder)
    return recorder


def test_each_phase_has_its_moment(recorder: Recorder, profile: Profile) -> None:
    """Each phase has the moment with the most memory in it, and the highest is the peak.

    There are 2,028 bytes with the loss, 2,828 with all gradients, which is the peak, and 2,050 in
    the optimizer step.
    """
    found = memory_by_module(snapshot_of(recorder.snapshot()), profile)
    assert 1820 / 1828 == found.matched_share
    older = {"before this step": 1000}
    activations = {
        "1, made in forward": 600,
        "0, made in forward": 400,
        "the model itself, made in forward": 20,
    }
    gradients = {"0, made in backward": 500, "1, made in backward": 300}
    unknown = {"no operator of the profile": 8}
    assert {
        "forward": older | activations | unknown,
        "backward": older | activations | unknown | gradients,
        "optimizer": older | gradients | {"the optimizer": 250},
        "peak": older | activations | unknown | gradients,
    } == found.moments


def test_a_failure_is_in_a_step_that_has_just_begun(recorder: Recorder, profile: Profile) -> None:
    """Gradients and optimizer state of the previous step keep their names in the failing step."""
    recorder.allocate(400, forward(1))
    recorder.fail(700, forward(2))
    found = memory_by_module(snapshot_of(recorder.snapshot()), profile)
    expected = {
        "before this step": 1000,
        "0, made in backward": 500,
        "0, made in forward": 400,
        "1, made in backward": 300,
        "the optimizer": 200,
    }
    assert 1.0 == found.matched_share
    assert {"forward": expected, "out of memory": expected} == found.moments


def test_the_smallest_are_left_out_of_a_long_step(
    recorder: Recorder, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a step has too many operators, the smallest are not matched.

    Here four of five operators outside the optimizer are matched; the one with 20 bytes is left
    out.
    """
    monkeypatch.setattr(modules, "MOST_OPERATORS", 4)
    modules._aligned.cache_clear()
    found = memory_by_module(snapshot_of(recorder.snapshot()), profile)
    modules._aligned.cache_clear()
    assert 1800 / 1828 == found.matched_share


@pytest.mark.parametrize("times", [2, 3])
def test_a_profile_of_another_batch_is_refused(
    recorder: Recorder, profile: Profile, times: int
) -> None:
    """With another batch size every allocation has another size, so nothing is matched.

    Allocations of the optimizer do not count as matches.
    """
    assert profile.memory is not None
    timeline = []
    for moment, (_, _, nbytes) in zip(profile.memory.timeline, MADE, strict=True):
        timeline.append(replace(moment, highest_bytes=moment.live_bytes + times * nbytes))
    other = replace(profile, memory=replace(profile.memory, timeline=tuple(timeline)))
    with pytest.raises(
        ProfileError,
        match=r"only 0 % of the bytes that were allocated in the step with the peak match",
    ):
        memory_by_module(snapshot_of(recorder.snapshot()), other)


def test_what_cannot_be_matched_says_why(recorder: Recorder, profile: Profile) -> None:
    """The error says that the profile has no memory, or that the snapshot has no stacks."""
    snapshot = snapshot_of(recorder.snapshot())
    with pytest.raises(ProfileError, match="the profile has no memory"):
        memory_by_module(snapshot, replace(profile, memory=None))
    without_stacks = tuple(each._replace(stack=()) for each in snapshot.trace)
    with pytest.raises(ProfileError, match="no forward pass with stacks"):
        memory_by_module(snapshot._replace(trace=without_stacks), profile)


def test_the_shell_has_a_table(
    recorder: Recorder, profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints the table as text or JSON; a comparison of two snapshots has no table."""
    snapshot = tmp_path / "s.pickle"
    snapshot.write_bytes(pickle.dumps(recorder.snapshot()))
    saved = tmp_path / "p.json"
    profile.save(saved)
    assert 0 == main(["memory", str(snapshot), "--profile", str(saved)])
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(
        "by module (99.6 % of the bytes that forward and backward allocate match operators of the "
        "profile)"
    )
    assert ["forward", "backward", "optimizer", "peak"] == lines[at + 1].split()
    assert (
        "600 B         600 B           0 B         600 B  1, made in forward"
        == lines[at + 3].strip()
    )
    assert 0 == main(["memory", str(snapshot), "--profile", str(saved), "--json"])
    assert ["forward", "backward", "optimizer", "peak"] == list(
        json.loads(capsys.readouterr().out)["by_module"]["moments"]
    )
    assert 2 == main(["memory", str(snapshot), str(snapshot), "--profile", str(saved)])
    assert "--profile" in capsys.readouterr().err
