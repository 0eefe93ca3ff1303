"""Ask lflops and other tools for the MACs of one conformance case.

A tool yields `(name, MACs)` pairs as soon as it has them. So the forward result is kept if backward
fails.
"""

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from lflops.inputs.tensors import tensors_in
from tests.conformance import CASES
from tests.conformance.case import Case
from tests.conformance.making import Function

What = Literal["forward", "backward", "recompute", "pointwise"]
Answers = Iterator[tuple[What, int]]

EARLY = "imported early"
NAMES = {
    id(getattr(home, name)): (home, name)
    for home in (torch.sparse, torch.linalg, Tensor, torch, F)
    for name in dir(home)
}
FVCORE_CONTRACTIONS = {"addmm", "bmm", "conv", "einsum", "linear", "matmul", "mm"}


class NoAnswerError(Exception):
    """The tool said of itself that it could not count."""


class Call(nn.Module):
    """A model behind a `forward` of nothing but positional tensors, for tools that take nothing else; whatever else is given is kept."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the tensors from the rest."""
        super().__init__()
        self.model = model
        self.anchor = nn.Parameter(
            torch.zeros(1)
        )  # calflops asks for the device of the first parameter
        self.given, self.form = tree_flatten((args, kwargs))
        self.places = [place for place, value in enumerate(self.given) if isinstance(value, Tensor)]
        self.inputs = tuple(self.given[place] for place in self.places)

    def forward(self, *inputs: Any, packed: tuple[Any, ...] = ()) -> Any:
        """Call the model, with what is packed where that is how the tool hands inputs on."""
        given = dict(enumerate(self.given)) | dict(zip(self.places, inputs or packed, strict=True))
        args, kwargs = tree_unflatten(given.values(), self.form)
        return self.model(*args, **kwargs)


def positional(case: Case) -> tuple[nn.Module, tuple[Any, ...]]:
    """The case's model, wrapped only where it needs to be, and its inputs by position."""
    model, args, kwargs = build(case)
    if kwargs or not all(isinstance(each, Tensor) for each in args):
        model = Call(model, args, kwargs)
        args = model.inputs
    return model, args


def build(case: Case) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The case, a function in it written out.

    Looked up by name when it is called, which is when patches reach it.
    """
    torch.manual_seed(0)
    model, args, kwargs = case.build()
    if isinstance(model, Function) and EARLY not in case.name:
        model.function = written_out(model.function)
    return model, args, kwargs


def written_out(value: Any) -> Any:
    """What looks a function of torch up at each call; anything else as it is."""
    home, name = NAMES.get(id(value), (None, ""))
    if isinstance(value, type) or getattr(home, name, None) is not value:
        return value

    def function(*args: Any, **kwargs: Any) -> Any:
        return getattr(home, name)(*args, **kwargs)

    return function


def lflops(case: Case) -> Answers:
    """`lflops.count`.

    The pointwise work that it finds is the room that other conventions are given.
    """
    from lflops import count

    model, args, kwargs = build(case)
    profile = count(model, args, kwargs, backward=case.backward is not None)
    yield "forward", profile.total()
    work = profile.modules[""].forward
    yield "pointwise", work.flops - 2 * work.macs
    if case.backward is not None:
        yield "backward", profile.total(phase="backward")
        yield "recompute", profile.total(phase="recompute")


def flop_counter_mode(*, attention: bool) -> Callable[[Case], Answers]:
    """What torch has, around forward and backward; recomputing is part of its backward.

    Args:
        attention: Whether to tell it that the CPU's fused attention costs what CUDA's does.
    """

    def count(case: Case) -> Answers:
        from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - the operator has no other name
        fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001
        cpus = {
            fused: inspect.unwrap(sdpa_flop),
            fused_backward: inspect.unwrap(sdpa_backward_flop),
        }
        model, args, kwargs = build(case)
        with FlopCounterMode(display=False, custom_mapping=cpus if attention else None) as counter:
            outputs = [each for each in tensors_in(model(*args, **kwargs)) if each.requires_grad]
            forward = counter.get_total_flops()
            yield "forward", forward // 2
            if case.backward is not None:
                torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
                yield "backward", (counter.get_total_flops() - forward) // 2

    return count


def deepspeed(case: Case) -> Answers:
    """`get_model_profile`; its backward is twice its forward."""
    from deepspeed.profiling.flops_profiler import get_model_profile

    model, args, kwargs = build(case)
    _, macs, _ = get_model_profile(
        model, args=list(args), kwargs=kwargs, print_profile=False, as_string=False
    )
    yield "forward", macs
    yield "backward", 2 * macs


def calflops(case: Case) -> Answers:
    """`calculate_flops`; `include_backPropagation` adds twice the forward."""
    from calflops import calculate_flops

    call = Call(*build(case))  # it takes keyword arguments, but of tensors only
    _, macs, _ = calculate_flops(
        call, args=list(call.inputs), print_results=False, output_as_string=False
    )
    yield "forward", macs
    yield "backward", 2 * macs


def fvcore(case: Case) -> Answers:
    """`FlopCountAnalysis`, the operators of it that multiply and accumulate."""
    from fvcore.nn import FlopCountAnalysis

    model, inputs = positional(case)
    by_operator = FlopCountAnalysis(model, inputs).by_operator()
    yield (
        "forward",
        sum(int(macs) for operator, macs in by_operator.items() if operator in FVCORE_CONTRACTIONS),
    )


def ptflops(backend: str) -> Callable[[Case], Answers]:
    """`get_model_complexity_info`, with inputs by name.

    By position, one backend gives the mean over the batch.
    """

    def count(case: Case) -> Answers:
        from ptflops import get_model_complexity_info

        call = Call(*build(case))
        macs, _ = get_model_complexity_info(
            call,
            (1,),
            input_constructor=lambda _: {"packed": call.inputs},
            print_per_layer_stat=False,
            as_strings=False,
            backend=backend,
        )
        if macs is None:
            raise NoAnswerError
        yield "forward", int(macs)

    return count


def thop(case: Case) -> Answers:
    """`profile`."""
    from thop import profile

    model, inputs = positional(case)
    macs, _ = profile(model, inputs=inputs, verbose=False)
    yield "forward", int(macs)


def torchinfo(case: Case) -> Answers:
    """`summary`, its mult-adds."""
    from torchinfo import summary

    model, inputs = positional(case)
    yield "forward", summary(model, input_data=list(inputs), verbose=0).total_mult_adds


@dataclass(frozen=True)
class Tool:
    """One tool and how to ask it.

    Attributes:
        name: What the tables call it.
        module: What to import ahead; its first part is the package.
        count: Gives the answers about one case.
        backward: Whether it says anything of backward.
    """

    name: str
    module: str
    count: Callable[[Case], Answers]
    backward: bool = False


TOOLS = (
    Tool("lflops", "lflops.flop_counter.count", lflops, backward=True),
    Tool(
        "FlopCounterMode",
        "torch.utils.flop_counter",
        flop_counter_mode(attention=False),
        backward=True,
    ),
    Tool(
        "FlopCounterMode, with attention",
        "torch.utils.flop_counter",
        flop_counter_mode(attention=True),
        backward=True,
    ),
    Tool("DeepSpeed", "deepspeed.profiling.flops_profiler", deepspeed, backward=True),
    Tool("calflops", "calflops", calflops, backward=True),
    Tool("fvcore", "fvcore.nn", fvcore),
    Tool("ptflops, aten", "ptflops", ptflops("aten")),
    Tool("ptflops, pytorch", "ptflops", ptflops("pytorch")),
    Tool("thop", "thop", thop),
    Tool("torchinfo", "torchinfo", torchinfo),
)


def load() -> None:
    """Import all tools and what they and the cases import late, so that processes forked from this one need not."""
    with quiet():
        for module in (
            *(tool.module for tool in TOOLS),
            "torch._dynamo",
        ):  # which dispatch modes load
            importlib.import_module(module)
        for case in CASES:
            case.build()
    for names in [
        vars(module) for name, module in sys.modules.items() if name.startswith("conformance.")
    ]:
        names.update({key: written_out(value) for key, value in names.items() if callable(value)})


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Send what is printed nowhere, by C as well."""
    kept = os.dup(1), os.dup(2)
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - devnull is no path of ours
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for place, descriptor in enumerate(kept, start=1):
            os.dup2(descriptor, place)
            os.close(descriptor)
