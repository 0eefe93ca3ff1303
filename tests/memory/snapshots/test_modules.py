"""The modules that hold a snapshot's memory, by a profile of the same run."""

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
    """Token ids to logits, through equal blocks."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.words = nn.Embedding(WORDS, hidden)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(hidden, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.words(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def training(model: nn.Module, samples: int = 32) -> Callable[[Callable[[str], Any]], None]:
    """A step, whose parts run in contexts of their names."""
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
    """Two steps by what the CPU's allocator reports, and for each allocation the part of the step and the module in which it was made."""
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
    with profiler(activities=[ProfilerActivity.CPU], profile_memory=True) as running:
        for _ in range(2):
            step(record_function)
    for hook in hooks:
        hook.remove()
    running.export_chrome_trace(str(folder / "trace.json"))
    events = exact(folder / "trace.json")["traceEvents"]
    ranges = [
        (each["ts"], each["ts"] + each["dur"], each["name"]) for each in events if each["ph"] == "X"
    ]
    parts, called = (
        [r for r in ranges if r[2] in PYTHON],
        [r for r in ranges if r[2].startswith("module ")],
    )
    recorder, addresses, truth = Recorder(), {}, {}
    for event in sorted(
        (each for each in events if each["name"] == "[memory]"), key=lambda each: each["ts"]
    ):
        at, nbytes, address = event["ts"], event["args"]["Bytes"], event["args"]["Addr"]
        part = next((name for begin, end, name in parts if begin <= at <= end), "")
        module = min(
            ((end - begin, name[7:]) for begin, end, name in called if begin <= at <= end),
            default=(0, None),
        )[1]
        if nbytes > 0:
            (addresses[address],) = recorder.allocate(
                nbytes, RECOMPUTED if part == "backward" and module else PYTHON[part]
            )
            truth[len(recorder.trace) - 1] = part, module
        elif address in addresses:
            recorder.free([addresses.pop(address)])
    return snapshot_of(recorder.snapshot()), truth


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_real_step_is_divided_as_its_hooks_divide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: bool
) -> None:
    """By the CPU's allocator.

    All but 5 % of the bytes are matched, each with the module that ran and the right phase.
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
    found = {
        place: name.partition(", made in ")[::2]
        for place, name in given.items()
        if ", made in " in name
    }
    for place, (name, phase) in found.items():
        part, module = truth[place]
        assert ("forward" if part == "loss" else part) == (
            "backward" if phase == "recompute" else phase
        )
        assert name == (module or "the model itself") or module is None
    assert {place for place, (part, _) in truth.items() if part == "optimizer"} == {
        p for p, name in given.items() if name == "the optimizer"
    }
    assert checkpoints == ("recompute" in {phase for _, phase in found.values()})


MADE: tuple[tuple[str, Phase, int], ...] = (
    ("0", "forward", 400),
    ("1", "forward", 600),
    ("", "forward", 20),
    ("1", "backward", 300),
    ("0", "backward", 500),
    ("", "optimizer", 250),
)
"""What the operators of a step allocate, and in which module."""


@pytest.fixture
def profile() -> Profile:
    """Two layers, whose step allocates `MADE`."""
    found = lflops.count(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), torch.zeros(1, 2))
    assert found.memory is not None
    live, nothing = 1000, found.memory.timeline[0].by_category
    timeline = []
    for index, (module, phase, nbytes) in enumerate(MADE):
        timeline.append(Moment("mm", module, phase, live, index, nothing, live + nbytes))
        live += nbytes
    return replace(found, memory=replace(found.memory, timeline=tuple(timeline)))


def step_of(recorder: Recorder) -> None:
    """The profile's step: one operator has two results, and one allocates 8 bytes that the profile does not know."""
    held = recorder.allocate(400, forward(1)) + recorder.allocate(8, forward(1))
    held += (
        recorder.allocate(500, forward(2))
        + recorder.allocate(100, forward(2))
        + recorder.allocate(20, loss(3))
    )
    recorder.allocate(300, BACKWARD)
    recorder.allocate(500, BACKWARD)
    recorder.free(held)
    recorder.allocate(200, STATE)
    recorder.free(recorder.allocate(50, UPDATE))


@pytest.fixture
def recorder() -> Recorder:
    """1,000 bytes of parameters, older than the recording, and one step."""
    recorder = Recorder()
    recorder.allocate(1000, BUILD)
    recorder.forget()
    step_of(recorder)
    return recorder


def test_each_phase_has_its_moment(recorder: Recorder, profile: Profile) -> None:
    """2,028 bytes with the loss, 2,828 with all gradients, 2,050 in the optimizer's step.

    The second is the peak.
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
    """Gradients of the step before and the optimizer's state keep their names."""
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
    assert (1.0, {"forward": expected, "out of memory": expected}) == (
        found.matched_share,
        found.moments,
    )


def test_the_smallest_are_left_out_of_a_long_step(
    recorder: Recorder, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five operators outside of the optimizer four are matched: all but that of 20 bytes."""
    monkeypatch.setattr(modules, "MOST_OPERATORS", 4)
    modules._aligned.cache_clear()
    found = memory_by_module(snapshot_of(recorder.snapshot()), profile)
    modules._aligned.cache_clear()
    assert 1800 / 1828 == found.matched_share


@pytest.mark.parametrize("times", [2, 3])
def test_a_profile_of_another_batch_is_refused(
    recorder: Recorder, profile: Profile, times: int
) -> None:
    """Everything has another size. What the optimizer makes is no match."""
    assert profile.memory is not None
    timeline = tuple(
        replace(each, highest_bytes=each.live_bytes + times * size)
        for each, (_, _, size) in _pairs(profile)
    )
    with pytest.raises(ProfileError, match=r"the profile matches 0 % of the step at the peak"):
        memory_by_module(
            snapshot_of(recorder.snapshot()),
            replace(profile, memory=replace(profile.memory, timeline=timeline)),
        )


def _pairs(profile: Profile) -> list[tuple[Moment, tuple[str, Phase, int]]]:
    assert profile.memory is not None
    return list(zip(profile.memory.timeline, MADE, strict=True))


def test_what_cannot_be_matched_says_why(recorder: Recorder, profile: Profile) -> None:
    """No memory in the profile, no stacks in the snapshot."""
    snapshot = snapshot_of(recorder.snapshot())
    with pytest.raises(ProfileError, match="the profile has no memory"):
        memory_by_module(snapshot, replace(profile, memory=None))
    with pytest.raises(ProfileError, match="no forward pass with stacks"):
        memory_by_module(
            snapshot._replace(trace=tuple(each._replace(stack=()) for each in snapshot.trace)),
            profile,
        )


def test_the_shell_has_a_table(
    recorder: Recorder, profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And JSON the same; a comparison has no such table."""
    (snapshot := tmp_path / "s.pickle").write_bytes(pickle.dumps(recorder.snapshot()))
    profile.save(saved := tmp_path / "p.json")
    assert 0 == main(["memory", str(snapshot), "--profile", str(saved)])
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(
        "by module of the profile (99.6 % of the bytes that forward and backward allocate are "
        "matched)"
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
