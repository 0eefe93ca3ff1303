"""Tensor subclasses like those of other packages, and losses that use them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

WIDTH = 4


class LabelTensor(Tensor):
    """A tensor with names of columns, as in pina. Its `__new__` makes an alias of the input."""

    @staticmethod
    def __new__(cls, x: Tensor, *_args: Any) -> "LabelTensor":  # noqa: ANN001, PYI034
        return super().__new__(cls, x)

    def __init__(self, _x: Tensor, labels: Iterable[str]) -> None:
        self.labels = list(labels)


class Plain(Tensor):
    """A class without methods, which torch's constructor creates."""


class Alias(Tensor):
    """A class whose `__new__` does the same as torch's `__new__`."""

    @staticmethod
    def __new__(cls, x: Tensor) -> "Alias":  # noqa: ANN001, PYI034
        return super().__new__(cls, x)


class OverriddenTensor(Tensor):
    """A tensor with `__torch_function__`, as in MONAI and fastai.

    Attributes:
        seen: Names of the functions that were called with such a tensor, and for each missing
            attribute that was read, "no" and its name.
    """

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        self.seen.append(f"no {name}")
        raise AttributeError(name)


class RefusingTensor(Tensor):
    """A class that supports the functions of torch, but raises an error for each ATen operator."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload):
            raise TypeError(f"{func} is no function that users call")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class WrapperTensor(Tensor):
    """A tensor that wraps another tensor with the values, as in torchao.

    Its `__torch_dispatch__` runs each operator on the inner tensors.
    """

    values_inside: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "WrapperTensor":  # noqa: ANN001, PYI034
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.values_inside = inner

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def unwrapped(value: Any) -> Any:
            return value.values_inside if isinstance(value, WrapperTensor) else value

        return func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))


def _square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).as_subclass(Tensor).square().mean()


def _physics(model: nn.Module, x: Tensor) -> Tensor:
    """Return the loss for the equation `u' = u`, as in a physics-informed solver.

    Backward differentiates the derivative again.
    """
    points = LabelTensor(x, "abcd").requires_grad_()
    u = model(points)
    (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    return (slope - u).as_subclass(Tensor).square().mean()


def _hessian(model: nn.Module, x: Tensor) -> Tensor:
    hessian = torch.func.hessian(lambda row: model(row).sum())
    return torch.func.vmap(hessian)(x).square().mean() + model(x).mean()


def _through_functional_call(model: nn.Module, x: Tensor) -> Tensor:
    def summed(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(model, weights, (row,))
        return out.sum()

    weights: dict[str, Tensor] = dict(model.named_parameters())
    per_sample = torch.func.vmap(torch.func.grad(summed), in_dims=(None, 0))
    gradients = per_sample(weights, x).values()
    return sum((each.square().mean() for each in gradients), model(x).mean())


def _jvp(model: nn.Module, x: Tensor) -> Tensor:
    value, slope = torch.func.jvp(model, (x,), (torch.ones_like(x),))  # type: ignore[misc]
    return (value.square() + slope.square()).mean()


def _nested(model: nn.Module, x: Tensor) -> Tensor:
    parts = torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)
    return model(parts).values().square().mean()


def _sparse(model: nn.Module, x: Tensor) -> Tensor:
    return model(torch.sparse.mm(torch.eye(len(x)).to_sparse(), x)).square().mean()


def _quantized(model: nn.Module, x: Tensor) -> Tensor:
    return model(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()).square().mean()


def _inference(model: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        target = model(OverriddenTensor(x)).as_subclass(Tensor)
    return F.mse_loss(model(x), target.clone() + 1)


def _made_of_numbers(model: nn.Module, x: Tensor) -> Tensor:
    from_numbers = Plain([1.0, 2.0, 3.0, 4.0])
    loss = (model(x) * from_numbers.as_subclass(Tensor)).square().mean()
    from_sizes = Plain(2, 3).zero_()
    return loss + 0 * from_sizes.sum().as_subclass(Tensor)


LOSSES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "super().__new__(cls, x)": lambda model, x: _square(model, LabelTensor(x, "abcd")),
    "torch.Tensor.__new__(cls, x)": lambda model, x: _square(model, Tensor.__new__(Plain, x)),
    "cls(x)": lambda model, x: _square(model, Plain(x)),
    "cls(numbers), cls(sizes)": _made_of_numbers,
    "as_subclass": lambda model, x: _square(model, x.as_subclass(OverriddenTensor)),
    "_make_subclass": lambda model, x: _square(model, Tensor._make_subclass(OverriddenTensor, x)),
    "a subclass that refuses operators": lambda model, x: _square(
        model, x.as_subclass(RefusingTensor)
    ),
    "_make_wrapper_subclass": lambda model, x: (
        model(x * WrapperTensor(torch.full_like(x, 2.0))).square().mean()
    ),
    "double backward": _physics,
    "hessian under vmap": _hessian,
    "gradients of each sample": _through_functional_call,
    "jvp": _jvp,
    "inference mode": _inference,
    "nested tensor": _nested,
    "sparse tensor": _sparse,
    "quantized tensor": _quantized,
}
"""Loss functions of a model and a batch, keyed by the feature of torch that they use."""
