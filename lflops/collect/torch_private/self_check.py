"""Whether torch still means what lflops takes it to mean.

Each name of `torch_compat` is asked for something whose answer is known: a torch that moved says so instead of giving wrong numbers.
"""

import functools
from typing import Any

import torch

from lflops.collect.torch_private import names as torch_compat
from lflops.errors import CountError

__all__ = ["check"]


@functools.cache
def check() -> None:
    """See that torch still means what lflops takes it to mean.

    Raises:
        CountError: It does not.
    """
    try:
        seen = _observe()
    except (AttributeError, TypeError, RuntimeError) as error:
        raise CountError(f"torch {torch.__version__}: its internals are not as lflops knows them: {error}") from error
    wrong = [fact for fact, holds in seen.items() if not holds]
    if wrong:
        raise CountError(f"torch {torch.__version__}: its internals are not as lflops knows them: {'; '.join(wrong)}")


class _Watch(torch_compat.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: list[int] = []
        self.names: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        if func.name() == "aten::mm" and torch_compat.current_node() is not None:
            self.numbers.append(torch_compat.sequence_number(torch_compat.current_node()))
        return func(*args, **(kwargs or {}))


def _observe() -> dict[str, bool]:
    """Two products on one input, the gradient of which is the case that naive attribution gets wrong."""
    aten = torch.ops.aten
    watch = _Watch()
    torch_compat.hear_of_higher_order(_Watch)
    with torch_compat.unseen(), torch.inference_mode(mode=False), torch.enable_grad():
        x = torch.zeros(2, 2, device="cpu", requires_grad=True)
        w = torch.zeros(2, 2, device="cpu", requires_grad=True)
        before = torch_compat.next_sequence_number()
        first = x.mm(w)
        between = torch_compat.next_sequence_number()
        second = x.mm(w)
        after = torch_compat.next_sequence_number()
        outside = torch_compat.backward_id()
        torch_compat.push_mode(watch)
        try:
            torch.autograd.grad([first, second], [x, w], [torch.zeros_like(first)] * 2)
        finally:
            torch_compat.pop_mode(watch)
        storage, key = torch_compat.storage_key(x)
    return {
        "autograd nodes are not numbered in the order they are built": before <= between - 1 and between <= after - 1,
        "a node's number does not survive to backward": watch.numbers == [after - 1] * 2 + [between - 1] * 2,
        "backward passes are not told apart": outside == torch_compat.NO_BACKWARD,
        "operators have other names": "aten::mm" in watch.names,
        "a storage has no key": key == torch_compat.storage_key(x.view(4))[1] and storage.nbytes() == x.nbytes,
        "views are not marked": aten.t.default.is_view and not aten.mm.default.is_view,
        "composite operators are not marked": torch_compat.decomposes(aten.linear.default) and not torch_compat.decomposes(aten.mm.default),
        "written arguments are not marked": torch_compat.written_arguments(aten.add_.Tensor) == (("self", 0),),
        "modes cannot be listed": not torch_compat.runs_nothing([x]),
        "fresh results are not marked": torch_compat.makes_storage(aten.mm.default) and not torch_compat.makes_storage(aten.add_.Tensor),
    }
