"""Test the trials that lflops runs during a training run.

They must not call the user's hooks, modes or patched functions, and must work in spite of them.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lflops.timing import measure, module_hooks
from lflops.timing.clock import HostClock
from lflops.timing.module_hooks import Chain
from lflops.torch_private import self_check


class UserError(Exception):
    """Raised by the user's code that no trial may run."""


def fails(*_: Any, **__: Any) -> Any:
    """Raise an error, because a trial has called the user's code."""
    raise UserError


@contextlib.contextmanager
def global_hooks() -> Iterator[None]:
    """Register global module hooks of every kind, which all raise an error."""
    names = (
        "forward_pre",
        "forward",
        "full_backward_pre",
        "full_backward",
        "buffer_registration",
        "module_registration",
        "parameter_registration",
    )
    with contextlib.ExitStack() as hooks:
        for name in names:
            register = getattr(torch_module, f"register_module_{name}_hook")
            hooks.callback(register(fails).remove)
        yield


class FunctionMode(TorchFunctionMode):
    """A mode that raises an error at each torch function."""

    __torch_function__ = fails


class DispatchMode(TorchDispatchMode):
    """A mode that raises an error at each operator."""

    __torch_dispatch__ = fails


@contextlib.contextmanager
def setting(change: Callable[[], object], undo: Callable[[], object]) -> Iterator[None]:
    """Change a setting of the whole process, and undo the change afterwards."""
    change()
    try:
        yield
    finally:
        undo()


@contextlib.contextmanager
def patched(owner: Any, name: str) -> Iterator[None]:
    """Replace a torch function by one that raises an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fails)
        yield


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "global hooks": global_hooks,
    "a function mode": FunctionMode,
    "a dispatch mode": DispatchMode,
    "saved-tensor hooks": lambda: saved_tensors_hooks(fails, fails),
    "forbidden saved-tensor hooks": lambda: disable_saved_tensors_hooks("not here"),
    "a patched Tensor.backward": lambda: patched(Tensor, "backward"),
    "a patched call of modules": lambda: patched(nn.Module, "__call__"),
    "a patched linear": lambda: patched(nn.functional, "linear"),
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "anomaly mode": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "default device": lambda: setting(
        lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)
    ),
    "default dtype": lambda: setting(
        lambda: torch.set_default_dtype(torch.bfloat16),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "deterministic algorithms": lambda: setting(
        lambda: torch.use_deterministic_algorithms(mode=True),
        lambda: torch.use_deterministic_algorithms(mode=False),
    ),
}


def trial_of_hooks() -> None:
    """Measure the overhead of hooks."""
    module_hooks._of_timer.cache_clear()
    assert min(vars(module_hooks.hook_overhead(HostClock())).values()) >= 0


def trial_of_counting() -> None:
    """Measure the overhead of counting."""
    measure._overhead.cache_clear()
    assert min(vars(measure._overhead()).values()) >= 0


def trial_of_private_names() -> None:
    """Run the self-check of private torch names."""
    self_check.check.cache_clear()
    self_check.check()


TRIALS = {
    "hooks": trial_of_hooks,
    "counting": trial_of_counting,
    "private names": trial_of_private_names,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("trial", TRIALS)
def test_a_trial_is_alone(trial: str, surrounding: str) -> None:
    """A trial works whatever the user has set, hooked or patched.

    It calls none of the user's code and draws no random number.
    """
    before = torch.get_rng_state()
    with SURROUNDINGS[surrounding]():
        TRIALS[trial]()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "surrounding",
    [
        "global hooks",
        "a function mode",
        "a dispatch mode",
        "saved-tensor hooks",
        "a patched Tensor.backward",
    ],
)
def test_the_surroundings_would_be_noticed(surrounding: str) -> None:
    """The surroundings of the test above raise an error in a pass of an ordinary module.

    So the test above would fail if a trial called the user's code.
    """
    linear = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    with SURROUNDINGS[surrounding](), pytest.raises(UserError):
        linear(x).sum().backward()


def test_the_hooks_of_a_chain_are_its_own() -> None:
    """The listener of a chain is called once for each of its modules, and for no other module.

    Other modules are those of another chain and of the user.
    """
    calls: list[str] = []

    class Listener:
        """Records its calls."""

        def enter_module(self, *_: Any) -> None:
            calls.append("enter")

        def leave_module(self, *_: Any) -> None:
            calls.append("leave")

    chain = Chain()
    other = Chain()
    chain.hooked(Listener())  # type: ignore[arg-type]
    other.root(torch.ones(()))
    nn.Identity()(torch.ones(()))
    assert not calls
    chain.root(torch.ones(()))
    assert ["enter", *["enter", "leave"] * module_hooks.LEAVES, "leave"] == calls
    calls.clear()
    chain.hooked()
    chain.root(torch.ones(()))
    assert not calls
