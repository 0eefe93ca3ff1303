"""Test the self-check of the private torch names that lflops uses.

The self-check runs before the first count. The tests replace functions, as if torch had changed.
"""

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
    """Run a test as if torch had not been checked yet, and check torch again afterwards.

    One of the replaced functions does not remove its hooks, so the fixture removes them.
    """
    # Otherwise, the module would be imported during the test, and keep the replaced names.
    importlib.import_module("lflops.flop_counter.count")
    torch_check.check.cache_clear()
    before = dict(_global_forward_hooks_with_kwargs)
    yield
    _global_forward_hooks_with_kwargs.clear()
    _global_forward_hooks_with_kwargs.update(before)
    torch_check.check.cache_clear()


def gone(*_: object) -> Any:
    """Raise the error of a name that does not exist."""
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
        "two backward passes cannot be told apart",
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
    "derivatives are unheard": (
        autograd,
        "watch_derivatives",
        lambda undo, called: None,
        "torch.autograd.grad is not distinguished from Tensor.backward",
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
        "operators whose results have new storage are not recognized",
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
"""Changed behavior of torch, and the text that the error must contain.

Each value is a module or a class, the name of a function in it, its replacement, and the text.
"""


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("subject", "name", "lie", "said"), LIES.values(), ids=LIES)
def test_a_torch_that_means_something_else_is_named(
    subject: ModuleType,
    name: str,
    lie: Callable[..., Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If torch behaves differently, `count` and `counting` raise an error instead of a wrong count.

    The error contains torch's version and the difference.
    """
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2)
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
    """The installed torch passes the self-check, in any mode in which the first count may run."""
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
    """If fake tensors behave differently, the check raises an error with torch's version.

    The check runs only before an estimate, because importing fake tensors takes a second. After a
    failure, the next estimate runs it again.
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
            "receiving a tensor does not dispatch the expected operator",
        ),
        ("is_pipeline_vote", lambda: True, "every received tensor is treated as a message"),
    ],
)
def test_a_fake_group_that_means_something_else_is_named(
    name: str, lie: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the fake process group behaves differently, the check raises an error.

    The check runs only before an estimate with a device mesh. After a failure, the next such
    estimate runs it again.
    """
    torch_check.check_fake_group.cache_clear()
    with monkeypatch.context() as torch_changes:
        torch_changes.setattr(distributed, name, lie)
        with pytest.raises(lflops.CountError, match=said):
            torch_check.check_fake_group()
    torch_check.check_fake_group()


class Recording:
    """A replacement for the functions of `cuda_memory`, with a snapshot written by hand."""

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
    """Return the snapshot with another name for a field, wherever it occurs."""
    if isinstance(snapshot, list):
        return [renamed(each, part) for each in snapshot]
    if not isinstance(snapshot, dict):
        return snapshot
    found = {}
    for name, value in snapshot.items():
        new_name = f"new_{name}" if name == part else name
        found[new_name] = renamed(value, part)
    return found


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
"""Changed behavior of CUDA's memory recording, and the text that the error must contain.

Each value is the name of a function of `cuda_memory`, its replacement, and the text.
"""


@pytest.mark.parametrize(("name", "lie", "said"), CUDA_LIES.values(), ids=CUDA_LIES)
def test_memory_of_cuda_that_is_recorded_otherwise_is_named(
    name: str, lie: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If CUDA's memory recording behaves differently, the error contains torch's version.

    The functions of `cuda_memory` are replaced, and the check's tensor is on the CPU, so no GPU is
    needed.
    """
    Recording().put_in_place(monkeypatch)
    torch_check.check_cuda_memory(CPU)
    torch_check.check_cuda_memory.cache_clear()
    monkeypatch.setattr(cuda_memory, name, lie)
    with pytest.raises(lflops.CountError, match=said) as caught:
        torch_check.check_cuda_memory(CPU)
    assert f"torch {torch.__version__}: " in str(caught.value)


def test_a_recording_of_the_users_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording that the user has started is neither started again nor stopped.

    Without one, the check starts a recording and stops it.
    """
    for was_on, asked in ((True, []), (False, ["record True", "stop"])):
        recording = Recording()
        recording.on = was_on
        recording.put_in_place(monkeypatch)
        torch_check.check_cuda_memory(CPU)
        assert (was_on, asked) == (recording.on, recording.asked)


def test_a_report_on_cuda_begins_with_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """`MemoryHistory` checks the recording of memory first on a CUDA device, and not on the CPU."""
    tried: list[torch.device] = []
    monkeypatch.setattr(out_of_memory, "check_cuda_memory", tried.append)
    monkeypatch.setattr(out_of_memory, "is_recording_memory", lambda: True)
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
    """If a private name is missing, importing the module raises the same error.

    The test loads a second copy of the module, and leaves the imported module unchanged.
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
    """Return the public functions of a file in `torch_private/`, without importing it.

    These are its own functions, and functions of torch that it assigns to an annotated name.
    """
    source = Path(str(torch_check.__file__)).with_name(f"{subject}.py").read_text()
    statements: list[ast.stmt] = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.With):
            statements += statement.body
        else:
            statements.append(statement)
    names = []
    for each in statements:
        if isinstance(each, ast.FunctionDef):
            names.append(each.name)
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            names.append(each.target.id)
    return [name for name in names if name.islower() and not name.startswith("_")]


def untried(check: str) -> list[str]:
    """Return the functions of `torch_private/` that the source of a self-check does not call."""
    missing = []
    for subject in SUBJECTS:
        for function in offered(subject):
            name = re.escape(f"{subject}.{function}")
            if not re.search(rf"\b{name}\(|undo\.add\({name}\b", check):
                missing.append(f"{subject}.{function}")
    return missing


def test_the_self_check_tries_every_function() -> None:
    """The self-check calls every function of `torch_private/`.

    The second assertion shows that a function without a call is found.
    """
    check = Path(str(torch_check.__file__)).read_text()
    assert [] == untried(check)
    assert ["tensors.storage_key"] == untried(check.replace("tensors.storage_key(", "key("))
