"""Cases of `linear_cross_entropy`, the last layer of a language model and its loss in one function.

One matmul computes the logits, and two more compute the gradients of input and weight. The function
can divide the rows into chunks. It then computes the gradients of a chunk in forward, while its
logits exist. It also has two dot products over all rows: of the logits at the targets, and of the
logarithms of the sums.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conformance.case import Build
from tests.conformance.making import Family, Made, data, layer, leaf
from tests.conformance.pencil import Macs, product

__all__ = ["CASES"]

rows = 8
width = 4
vocabulary = 64
places = 3
POLICIES = ["accurate", "compact"]
"""The policies for the precision of chunks."""

if torch.__version__ < "2.14":
    # torch.__version__ compares by the numbers of a version.
    POLICIES.append("balanced")

trained = Family("language model heads").trained
inference = Family("language model heads").inference


class Head(nn.Module):
    """A head with its loss."""

    def __init__(
        self,
        *shape: int,
        bias: bool = False,
        frozen: bool = False,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(*shape, width, dtype=dtype), requires_grad=not frozen
        )
        self.bias = nn.Parameter(torch.randn(*shape, dtype=dtype)) if bias else None
        self.options = options

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.linear_cross_entropy(x, self.weight, target, linear_bias=self.bias, **self.options)


def chunked(size: int | None = 2, **options: Any) -> Callable[[], Any]:
    """Return a function that creates options for chunks of `size` rows.

    With `None`, torch chooses the number of rows.
    """

    def make() -> Any:
        fields = {"chunking_method": None, "batch_chunk_size": size} if size else {}
        return torch.nn.LinearCrossEntropyOptions(**fields, **options)

    return make


targets = Made(lambda: torch.randint(0, vocabulary, (rows,)))
some_ignored = Made(lambda: torch.arange(rows).where(torch.arange(rows) % 3 > 0, -100))
probabilities = Made(lambda: torch.softmax(torch.randn(rows, vocabulary), -1))


def head(
    *shape: int,
    target: Made = targets,
    x: Made | None = None,
    options: Callable[[], Any] | None = None,
    **fields: Any,
) -> Build:
    """Return a `Build` of a head that receives rows and targets.

    `shape` is the shape of the weight without its last dimension, by default the vocabulary.
    """
    given = leaf(rows, width) if x is None else x

    def make() -> nn.Module:
        made = None if options is None else options()
        return Head(*(shape or (vocabulary,)), options=made, **fields)

    return layer(make, given, target)


once = product(rows, width, vocabulary)
dots = 2 * rows
at_once = Macs(once.forward + once.backward + dots)
"""MACs with chunks. All of them are in forward, and backward only scales the gradients."""

OF_LOGITS = (
    trained("linear cross entropy", head(), once),
    trained("linear cross entropy with a bias", head(bias=True), once),
    trained("linear cross entropy, a loss for each row", head(reduction="none"), once),
    trained("linear cross entropy, smoothed", head(label_smoothing=0.1), once),
    trained("linear cross entropy to probabilities", head(target=probabilities), once),
    trained(
        "linear cross entropy of several words a row",
        head(vocabulary, places, target=Made(lambda: torch.randint(0, vocabulary, (rows, places)))),
        product(rows, width, vocabulary, places),
    ),
    trained(
        "linear cross entropy of a frozen head",
        head(frozen=True),
        product(rows, width, vocabulary, gradients=1),
    ),
    trained(
        "linear cross entropy, smoothed, asked for chunks",
        head(label_smoothing=0.1, options=chunked()),
        once,
    ),
)

BY_CHUNKS = (
    *(
        trained(
            f"linear cross entropy in chunks, {policy}",
            head(options=chunked(acc_policy=policy)),
            at_once,
        )
        for policy in POLICIES
    ),
    trained(
        "linear cross entropy in chunks of torch's choice", head(options=chunked(None)), at_once
    ),
    trained(
        "linear cross entropy in chunks that do not divide the rows",
        head(options=chunked(3)),
        at_once,
    ),
    trained(
        "linear cross entropy in chunks, summed", head(options=chunked(), reduction="sum"), at_once
    ),
    trained(
        "linear cross entropy in chunks with a bias", head(options=chunked(), bias=True), at_once
    ),
    trained(
        "linear cross entropy in chunks, some rows ignored",
        head(options=chunked(), target=some_ignored),
        at_once,
    ),
    trained(
        "linear cross entropy in chunks, backward twice",
        head(options=chunked(allow_retain_graph=True)),
        at_once,
    ),
    trained(
        "linear cross entropy in chunks of bfloat16",
        head(options=chunked(), dtype=torch.bfloat16, x=leaf(rows, width, dtype=torch.bfloat16)),
        at_once,
    ),
    trained(
        "linear cross entropy in chunks of a frozen head",
        head(options=chunked(), frozen=True),
        Macs(2 * once.forward + dots),
    ),
    trained(
        "linear cross entropy in chunks of data",
        head(options=chunked(), x=data(rows, width)),
        Macs(2 * once.forward + dots),
    ),
    inference(
        "linear cross entropy in chunks, evaluated",
        head(options=chunked()),
        Macs(once.forward + dots),
    ),
    # In forward, the factors of the losses of the rows are not known yet, so backward computes the
    # logits again.
    trained(
        "linear cross entropy in chunks, a loss for each row",
        head(options=chunked(), reduction="none"),
        Macs(once.forward, once.backward + dots, once.forward),
    ),
    inference(
        "linear cross entropy in chunks, a loss for each row, evaluated",
        head(options=chunked(), reduction="none"),
        Macs(once.forward),
    ),
)

CASES = (*OF_LOGITS, *BY_CHUNKS) if hasattr(F, "linear_cross_entropy") else ()
