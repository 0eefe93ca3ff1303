"""The private names of torch that lflops uses are tried out before the first count."""

import ast
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks_with_kwargs

import lflops
from lflops.monitoring.outputs import out_of_memory
from lflops.torch_private import (
    autograd,
    cuda_memory,
    distributed,
    modules,
    operators,
    self_check as torch_check,
    tensors,
)
from tests.support.memory_snapshots import Recorder, forward

CPU = torch.device("cpu")


@pytest.fixture
def unchecked() -> Iterator[None]:
    """The test of torch has not been made yet, and is made anew afterwards.

    A lie about removing hooks leaves none.
    """
    importlib.import_module(
        "lflops.flop_counter.count"
    )  # or it would be loaded, and kept, with names that are not torch's
    torch_check.check.cache_clear()
    before = dict(_global_forward_hooks_with_kwargs)
    yield
    _global_forward_hooks_with_kwargs.clear()
    _global_forward_hooks_with_kwargs.update(before)
    torch_check.check.cache_clear()


def gone(*_: object) -> Any:
    """What a name does that is no longer there."""
    raise AttributeError("no such name")


LIES: dict[str, tuple[ModuleType | type, str, Callable[..., Any], str]] = {
    "numbers stand still": (
        autograd,
        "next_sequence_number",
        lambda: 0,
        "not numbered in the order of their creation",
    ),
    "numbers are gone": (autograd, "next_sequence_number", gone, "no such name"),
    "nodes have other numbers": (
        autograd,
        "sequence_number",
        lambda node: 0,
        "changes before backward",
    ),
    "no node is running": (autograd, "current_node", lambda: None, "changes before backward"),
    "always in backward": (
        autograd,
        "backward_id",
        lambda: 5,
        "backward passes cannot be distinguished",
    ),
    "backward is gone": (autograd, "backward_id", gone, "no such name"),
    "backward has no end": (
        autograd,
        "after_backward",
        lambda callback: None,
        "the end of a backward pass is not reported",
    ),
    "backward is unheard": (
        autograd,
        "wrap_backward",
        lambda undo, begins, ends: None,
        "the end of a backward pass is not reported",
    ),
    "graphs have no leaves": (
        autograd,
        "leaves",
        lambda tensors: [],
        "leaves of an autograd graph are not found",
    ),
    "profilers are gone": (autograd, "profiler_is_recording", gone, "no such name"),
    "a profiler that is prepared is not reported": (
        autograd,
        "wrap_profilers",
        lambda undo, call: None,
        "the start of a profiler is not reported",
    ),
    "all storages are one": (
        tensors,
        "storage_key",
        lambda tensor: (tensor.untyped_storage(), id(tensor)),
        "a tensor and its view do not have the same storage key",
    ),
    "sparse tensors store all": (
        tensors,
        "stored_elements",
        lambda tensor: tensor.numel(),
        "a sparse tensor has unexpected parts",
    ),
    "everything is sharded": (
        tensors,
        "local_part",
        lambda tensor: tensor[0],
        "reported as a part of a DTensor",
    ),
    "everything is fake": (
        tensors,
        "only_shapes_run",
        lambda given: True,
        "a plain tensor is reported as a fake tensor",
    ),
    "everything decomposes": (
        operators,
        "decomposes",
        lambda operator: True,
        "composite operators are not marked as composite",
    ),
    "nothing is written": (
        operators,
        "written_arguments",
        lambda operator: (),
        "arguments that an operator writes to are not marked",
    ),
    "nothing is new": (
        operators,
        "makes_storage",
        lambda operator: False,
        "results with new storage are not marked",
    ),
    "nothing is nested": (
        operators,
        "has_nested_kernel",
        lambda operator: False,
        "kernels for nested tensors are not found",
    ),
    "nothing has overloads": (
        operators,
        "overloads_of",
        lambda operator: [],
        "overloads of an operator are not listed",
    ),
    "modules have no children": (
        modules,
        "child_modules",
        lambda module: [],
        "submodules of a module are not found",
    ),
    "everything is compiled": (
        modules,
        "is_compiled",
        lambda module: True,
        "reported as compiled",
    ),
    "nothing is heard of compilations": (
        modules.Compilations,
        "listen",
        lambda listener, guard: None,
        "the start of a compilation is not reported",
    ),
    "compilations are heard for ever": (
        modules.Compilations,
        "stop",
        lambda listener: None,
        "the start of a compilation is not reported",
    ),
    "hooks are scripted": (modules, "scripted_without", gone, "no such name"),
    "hooks stay": (
        modules,
        "remove_hook",
        lambda hook, owner: None,
        "registered hooks are not found",
    ),
    "everything is flat": (
        distributed,
        "flat_parts",
        lambda module: [module],
        "reported as sharded",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("subject", "name", "lie", "said"), LIES.values(), ids=LIES)
def test_a_torch_that_means_something_else_is_named(
    subject: ModuleType,
    name: str,
    lie: Callable[..., Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong number is worse than none.

    The error has torch's version and what is no longer so, for `count` and for `counting`.
    """
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with monkeypatch.context() as torch_changes:
        torch_changes.setattr(subject, name, lie)
        for ask in (lambda: lflops.count(model, x), lambda: lflops.counting(model)):
            with pytest.raises(lflops.CountError) as caught:
                ask()
            assert f"torch {torch.__version__}: " in str(caught.value)
            assert said in str(caught.value)
    assert lflops.count(model, x).total() == 4


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        lambda: lflops.counting(nn.Linear(2, 2)),
    ],
    ids=["no_grad", "inference_mode", "autocast", "default device", "counting"],
)
def test_the_torch_at_hand_passes_wherever_it_is_first_asked(context: Callable[[], Any]) -> None:
    """In whatever mode the first count is made."""
    with context():
        torch_check.check.cache_clear()
        torch_check.check()


@pytest.mark.parametrize(
    ("name", "lie"),
    [("only_shapes_run", lambda given: False), ("FakeTensor", torch.Tensor), ("fake_mode", gone)],
)
def test_fake_tensors_that_mean_something_else_are_named(
    name: str, lie: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an estimate tries them, because loading them takes a second.

    The one after it tries them again.
    """
    torch_check.check_fake_tensors.cache_clear()
    with monkeypatch.context() as torch_changes:
        torch_changes.setattr(tensors, name, lie)
        with pytest.raises(lflops.CountError, match=torch.__version__.replace("+", r"\+")):
            torch_check.check_fake_tensors()
    torch_check.check_fake_tensors()


@pytest.mark.parametrize(
    ("name", "lie", "said"),
    [
        (
            "receive_operator",
            lambda: None,
            "a received tensor does not dispatch the expected operator",
        ),
        ("is_pipeline_vote", lambda: True, "every received tensor is treated as a vote"),
    ],
)
def test_a_fake_group_that_means_something_else_is_named(
    name: str, lie: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an estimate of a mesh tries it; the one after it tries it again."""
    torch_check.check_fake_group.cache_clear()
    with monkeypatch.context() as torch_changes:
        torch_changes.setattr(distributed, name, lie)
        with pytest.raises(lflops.CountError, match=said):
            torch_check.check_fake_group()
    torch_check.check_fake_group()


class Recording:
    """The names of CUDA's memory with an allocator written by hand."""

    def __init__(self) -> None:
        self.on = False
        self.asked: list[str] = []

    def record_memory(self, most: int) -> None:
        self.on = True
        self.asked.append(f"record {most > 0}")

    def stop_recording_memory(self) -> None:
        self.on = False
        self.asked.append("stop")

    def is_recording_memory(self) -> bool:
        return self.on

    def memory_snapshot(self) -> Any:
        recorder = Recorder()
        recorder.allocate(512, forward(30))
        return recorder.snapshot()

    def put_in_place(self, patch: pytest.MonkeyPatch) -> None:
        for name in offered("cuda_memory"):
            patch.setattr(cuda_memory, name, getattr(self, name))
        torch_check.check_cuda_memory.cache_clear()


def renamed(snapshot: Any, part: str) -> Any:
    """The snapshot with another name for a part, wherever it is."""
    if isinstance(snapshot, dict):
        return {
            f"new_{name}" if name == part else name: renamed(value, part)
            for name, value in snapshot.items()
        }
    return [renamed(each, part) for each in snapshot] if isinstance(snapshot, list) else snapshot


CUDA_LIES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "recordings are not seen": (
        "is_recording_memory",
        lambda: False,
        "an active recording of CUDA memory is not detected",
    ),
    "recordings go on": ("stop_recording_memory", lambda: None, "cannot be stopped"),
    "recording is gone": ("record_memory", gone, "no such name"),
    "recording takes other arguments": (
        "record_memory",
        lambda: None,
        "takes 0 positional arguments",
    ),
    "snapshots are gone": ("memory_snapshot", gone, "no such name"),
    "blocks have other parts": (
        "memory_snapshot",
        lambda: renamed(Recording().memory_snapshot(), "requested_size"),
        "lacks the expected block fields",
    ),
    "traces have other parts": (
        "memory_snapshot",
        lambda: renamed(Recording().memory_snapshot(), "addr"),
        "lacks the expected trace entries",
    ),
    "stacks have other parts": (
        "memory_snapshot",
        lambda: renamed(Recording().memory_snapshot(), "filename"),
        "lacks the expected trace entries",
    ),
}


@pytest.mark.parametrize(("name", "lie", "said"), CUDA_LIES.values(), ids=CUDA_LIES)
def test_memory_of_cuda_that_is_recorded_otherwise_is_named(
    name: str, lie: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's version. The allocator is one by hand, and the trial's tensor is on the CPU."""
    Recording().put_in_place(monkeypatch)
    torch_check.check_cuda_memory(CPU)
    torch_check.check_cuda_memory.cache_clear()
    monkeypatch.setattr(cuda_memory, name, lie)
    with pytest.raises(lflops.CountError, match=said) as caught:
        torch_check.check_cuda_memory(CPU)
    assert f"torch {torch.__version__}: " in str(caught.value)


def test_a_recording_of_the_users_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither begun again nor ended; without one, the trial ends its own."""
    for was_on, asked in ((True, []), (False, ["record True", "stop"])):
        recording = Recording()
        recording.on = was_on
        recording.put_in_place(monkeypatch)
        torch_check.check_cuda_memory(CPU)
        assert (was_on, asked) == (recording.on, recording.asked)


def test_a_report_on_cuda_begins_with_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU there is none."""
    tried: list[torch.device] = []
    for name, stand_in in (
        ("check_cuda_memory", tried.append),
        ("is_recording_memory", lambda: True),
    ):
        monkeypatch.setattr(out_of_memory, name, stand_in)
    for device in (CPU, torch.device("cuda", 1)):
        out_of_memory.MemoryHistory(device).start()
    assert [torch.device("cuda", 1)] == tried


PRIVATE = [
    "torch.autograd._get_sequence_nr",
    "torch._C._current_graph_task_id",
    "torch._C._current_autograd_node",
]


@pytest.mark.parametrize("name", PRIVATE)
def test_a_torch_without_a_private_name_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same error where a name is missing altogether.

    The page is loaded afresh, beside the one in use.
    """
    monkeypatch.delattr(name)
    spec = importlib.util.spec_from_file_location("autograd_afresh", autograd.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(lflops.CountError, match=torch.__version__.replace("+", r"\+")):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


SUBJECTS = (
    "autograd",
    "cuda_memory",
    "dispatch_modes",
    "distributed",
    "inductor",
    "modules",
    "operators",
    "tensor_constructors",
    "tensors",
)


def offered(subject: str) -> list[str]:
    """The functions that a file of the folder has for others, its own and those of torch that it names and types.

    None is loaded.
    """
    body = ast.parse(Path(str(torch_check.__file__)).with_name(f"{subject}.py").read_text()).body
    statements = [
        each
        for statement in body
        for each in (statement.body if isinstance(statement, ast.With) else [statement])
    ]
    names = [each.name for each in statements if isinstance(each, ast.FunctionDef)]
    names += [
        each.target.id
        for each in statements
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    return [name for name in names if name.islower() and not name.startswith("_")]


def untried(check: str) -> list[str]:
    """The functions of torch_private that the text of a self-check does not call."""
    functions = [f"{subject}.{name}" for subject in SUBJECTS for name in offered(subject)]
    return [
        name
        for name in functions
        if not re.search(rf"\b{re.escape(name)}\(|undo\.add\({re.escape(name)}\b", check)
    ]


def test_the_self_check_tries_every_function() -> None:
    """A function that is added without a trial is named; so is one whose trial is taken out."""
    check = Path(str(torch_check.__file__)).read_text()
    assert [] == untried(check)
    assert ["tensors.storage_key"] == untried(check.replace("tensors.storage_key(", "key("))
