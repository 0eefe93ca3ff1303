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
    """The tool itself reported that it could not count."""


class Call(nn.Module):
    """A model whose `forward` accepts only positional tensors, for tools that pass nothing else.

    All other arguments are stored.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Separate the tensors from the other arguments."""
        super().__init__()
        self.model = model
        # calflops reads the device of the first parameter.
        self.anchor = nn.Parameter(torch.zeros(1))
        self.given, self.form = tree_flatten((args, kwargs))
        self.places = [place for place, value in enumerate(self.given) if isinstance(value, Tensor)]
        self.inputs = tuple(self.given[place] for place in self.places)

    def forward(self, *inputs: Any, packed: tuple[Any, ...] = ()) -> Any:
        """Call the model.

        Some tools pass the tensors as `packed` instead of `inputs`.
        """
        given = dict(enumerate(self.given)) | dict(zip(self.places, inputs or packed, strict=True))
        args, kwargs = tree_unflatten(given.values(), self.form)
        return self.model(*args, **kwargs)


def positional(case: Case) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return the model of a case, wrapped only if necessary, and its positional inputs."""
    model, args, kwargs = build(case)
    if kwargs or not all(isinstance(each, Tensor) for each in args):
        model = Call(model, args, kwargs)
        args = model.inputs
    return model, args


def build(case: Case) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Build a case.

    If its model is a function, the function is looked up by name at each call, so that patches of
    it take effect.
    """
    torch.manual_seed(0)
    model, args, kwargs = case.build()
    if isinstance(model, Function) and EARLY not in case.name:
        model.function = written_out(model.function)
    return model, args, kwargs


def written_out(value: Any) -> Any:
    """Return a function that looks up a function of torch at each call.

    Any other value is returned unchanged.
    """
    home, name = NAMES.get(id(value), (None, ""))
    if isinstance(value, type) or getattr(home, name, None) is not value:
        return value

    def function(*args: Any, **kwargs: Any) -> Any:
        return getattr(home, name)(*args, **kwargs)

    return function


def lflops(case: Case) -> Answers:
    """Run `lflops.count`.

    The pointwise work that it finds is the tolerance for tools with another convention.
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
    """Return a function that runs FlopCounterMode. Its backward includes recomputation.

    Args:
        attention: Whether the CPU's fused attention uses the formula of CUDA's fused attention.
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
    """Run `get_model_profile`. Its backward is always twice its forward."""
    from deepspeed.profiling.flops_profiler import get_model_profile

    model, args, kwargs = build(case)
    _, macs, _ = get_model_profile(
        model, args=list(args), kwargs=kwargs, print_profile=False, as_string=False
    )
    yield "forward", macs
    yield "backward", 2 * macs


def calflops(case: Case) -> Answers:
    """Run `calculate_flops`. Its `include_backPropagation` adds twice the forward."""
    from calflops import calculate_flops

    # calflops accepts keyword arguments only if they are tensors.
    call = Call(*build(case))
    _, macs, _ = calculate_flops(
        call, args=list(call.inputs), print_results=False, output_as_string=False
    )
    yield "forward", macs
    yield "backward", 2 * macs


def fvcore(case: Case) -> Answers:
    """Run `FlopCountAnalysis`, and add its operators that multiply and accumulate."""
    from fvcore.nn import FlopCountAnalysis

    model, inputs = positional(case)
    by_operator = FlopCountAnalysis(model, inputs).by_operator()
    yield (
        "forward",
        sum(int(macs) for operator, macs in by_operator.items() if operator in FVCORE_CONTRACTIONS),
    )


def ptflops(backend: str) -> Callable[[Case], Answers]:
    """Return a function that runs `get_model_complexity_info` with inputs by name.

    With positional inputs, one of its backends returns the mean over the batch.
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
    """Run `profile`."""
    from thop import profile

    model, inputs = positional(case)
    macs, _ = profile(model, inputs=inputs, verbose=False)
    yield "forward", int(macs)


def torchinfo(case: Case) -> Answers:
    """Run `summary`, and return its mult-adds."""
    from torchinfo import summary

    model, inputs = positional(case)
    yield "forward", summary(model, input_data=list(inputs), verbose=0).total_mult_adds


@dataclass(frozen=True)
class Tool:
    """A tool and how to run it.

    Attributes:
        name: The name of the tool in the tables.
        module: The module to import first. Its first part is the package.
        count: Function that yields the answers for a case.
        backward: Whether it reports backward.
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
    """Import all tools, and the modules that tools and cases import late.

    Processes that are forked afterwards need not import them.
    """
    with quiet():
        # Dispatch modes import torch._dynamo.
        for module in (
            *(tool.module for tool in TOOLS),
            "torch._dynamo",
        ):
            importlib.import_module(module)
        for case in CASES:
            case.build()
    for names in [
        vars(module) for name, module in sys.modules.items() if name.startswith("conformance.")
    ]:
        names.update({key: written_out(value) for key, value in names.items() if callable(value)})


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard all output, including the output of C code."""
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
