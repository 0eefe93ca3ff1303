"""The trials that lflops runs inside of a training call nothing of the user's, and nothing of the user's breaks them."""

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
    """Raised by a user's code that no trial may run."""


def fails(*_: Any, **__: Any) -> Any:
    """Be called by a trial."""
    raise UserError


@contextlib.contextmanager
def global_hooks() -> Iterator[None]:
    """Every kind of global module hook, each of which raises."""
    names = (
        "forward_pre",
        "forward",
        "full_backward_pre",
        "full_backward",
        "buffer_registration",
        "module_registration",
    )
    registers = [
        getattr(torch_module, f"register_module_{name}_hook")
        for name in (*names, "parameter_registration")
    ]
    with contextlib.ExitStack() as hooks:
        for register in registers:
            hooks.callback(register(fails).remove)
        yield


class FunctionMode(TorchFunctionMode):
    """Raises at each function of torch."""

    __torch_function__ = fails


class DispatchMode(TorchDispatchMode):
    """Raises at each operator."""

    __torch_dispatch__ = fails


@contextlib.contextmanager
def setting(change: Callable[[], object], undo: Callable[[], object]) -> Iterator[None]:
    """A setting of the whole process."""
    change()
    try:
        yield
    finally:
        undo()


@contextlib.contextmanager
def patched(owner: Any, name: str) -> Iterator[None]:
    """A function of torch's that a user has replaced."""
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
    """What hooks cost, measured."""
    module_hooks._of_timer.cache_clear()
    assert min(vars(module_hooks.hook_overhead(HostClock())).values()) >= 0


def trial_of_counting() -> None:
    """What counting costs, measured."""
    measure._overhead.cache_clear()
    assert min(vars(measure._overhead()).values()) >= 0


def trial_of_private_names() -> None:
    """The self-check."""
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
    """Whatever the user has set, hooked or patched.

    Nothing of it is called, the trial holds, and no random number is drawn.
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
    """The planted culprit: a pass of a usual module calls what the user has there."""
    linear, x = nn.Linear(2, 2), torch.ones(1, 2)
    with SURROUNDINGS[surrounding](), pytest.raises(UserError):
        linear(x).sum().backward()


def test_the_hooks_of_a_chain_are_its_own() -> None:
    """Each module of it is entered and left once, and those of another chain, or of the user, are not."""
    calls: list[str] = []

    class Listener:
        """Notes what it hears of."""

        def enter_module(self, *_: Any) -> None:
            calls.append("enter")

        def leave_module(self, *_: Any) -> None:
            calls.append("leave")

    chain, other = Chain(), Chain()
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
