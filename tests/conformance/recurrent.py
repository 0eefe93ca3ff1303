"""Cases of recurrent layers.

In each step, every gate multiplies the input and the state by its weights. A projection multiplies
the output.

On a CPU, an LSTM of 32-bit floats runs one kernel for each layer and direction, and its backward
computes all gradients. The other layers run operator by operator. There, the first state is zero
and requires no gradient, so its matmul has one matmul in backward instead of two.
"""

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from tests.conformance.making import Family, Made, data, layer, leaf
from tests.conformance.pencil import Macs, product

__all__ = ["CASES"]

steps = 5
batch = 2
inputs = 3
hidden = 4
projected = 2
vectors = steps * batch
x = leaf(steps, batch, inputs)
given = data(steps, batch, inputs)
state = leaf(1, batch, hidden)
trained = Family("recurrent").trained
inference = Family("recurrent").inference

# Numbers of gates.
RNN = 1
GRU = 3
LSTM = 4


def fused(gates: int, width: int = inputs, rows: int = vectors) -> Macs:
    """Return the MACs of a layer in one kernel, which computes the gradients of all operands."""
    return product(rows, width + hidden, gates * hidden)


def stepwise(
    gates: int,
    width: int = inputs,
    rows: int = vectors,
    first: int = batch,
    *,
    of_data: bool = False,
    state: int = hidden,
) -> Macs:
    """Return the MACs of a layer that runs operator by operator.

    All inputs are multiplied at once, and then the state in each step. In the first step, the state
    of `first` rows is zero.
    """
    of_inputs = product(rows, width, gates * hidden, gradients=1 if of_data else 2)
    return (
        of_inputs
        + product(first, state, gates * hidden, gradients=1)
        + product(rows - first, state, gates * hidden)
    )


lengths = (5, 3, 2)
packed_rows = sum(lengths)


def packed() -> PackedSequence:
    """Return packed sequences of several lengths."""
    return pack_padded_sequence(torch.randn(max(lengths), len(lengths), inputs), lengths)


FUSED = (
    trained("LSTM", layer(lambda: nn.LSTM(inputs, hidden), x), fused(LSTM)),
    trained("LSTM of data", layer(lambda: nn.LSTM(inputs, hidden), given), fused(LSTM)),
    trained(
        "LSTM by keyword",
        layer(lambda: nn.LSTM(inputs, hidden), input=x, hx=(state, state)),
        fused(LSTM),
    ),
    trained(
        "LSTM without biases", layer(lambda: nn.LSTM(inputs, hidden, bias=False), x), fused(LSTM)
    ),
    trained(
        "LSTM, batch first",
        layer(lambda: nn.LSTM(inputs, hidden, batch_first=True), leaf(batch, steps, inputs)),
        fused(LSTM),
    ),
    trained(
        "LSTM without a batch",
        layer(lambda: nn.LSTM(inputs, hidden), leaf(steps, inputs)),
        fused(LSTM, rows=steps),
    ),
    trained(
        "LSTM, two layers with dropout",
        layer(lambda: nn.LSTM(inputs, hidden, 2, dropout=0.1), x),
        fused(LSTM) + fused(LSTM, hidden),
    ),
    trained(
        "LSTM, two layers in both directions",
        layer(lambda: nn.LSTM(inputs, hidden, 2, bidirectional=True), x),
        2 * fused(LSTM) + 2 * fused(LSTM, 2 * hidden),
    ),
    inference("LSTM in inference", layer(lambda: nn.LSTM(inputs, hidden), given), fused(LSTM)),
)

STEPWISE = (
    trained("GRU", layer(lambda: nn.GRU(inputs, hidden), x), stepwise(GRU)),
    trained(
        "GRU of data", layer(lambda: nn.GRU(inputs, hidden), given), stepwise(GRU, of_data=True)
    ),
    trained("GRU with a state", layer(lambda: nn.GRU(inputs, hidden), x, state), fused(GRU)),
    trained(
        "GRU, two layers in both directions",
        layer(lambda: nn.GRU(inputs, hidden, 2, bidirectional=True), x),
        2 * stepwise(GRU) + 2 * stepwise(GRU, 2 * hidden),
    ),
    inference("GRU in inference", layer(lambda: nn.GRU(inputs, hidden), given), stepwise(GRU)),
    trained("RNN with tanh", layer(lambda: nn.RNN(inputs, hidden), x), stepwise(RNN)),
    trained(
        "RNN with ReLU",
        layer(lambda: nn.RNN(inputs, hidden, nonlinearity="relu"), x),
        stepwise(RNN),
    ),
    trained(
        "LSTM with a projection",
        layer(lambda: nn.LSTM(inputs, hidden, proj_size=projected), x),
        stepwise(LSTM, state=projected) + product(vectors, hidden, projected),
    ),
    trained(
        "LSTM of 64-bit floats",
        layer(
            lambda: nn.LSTM(inputs, hidden).double(),
            leaf(steps, batch, inputs, dtype=torch.float64),
        ),
        stepwise(LSTM),
    ),
    *(
        trained(
            f"{kind.__name__} of packed sequences",
            layer(lambda kind=kind: kind(inputs, hidden), Made(packed)),
            stepwise(gates, rows=packed_rows, first=len(lengths), of_data=True),
        )
        for kind, gates in ((nn.LSTM, LSTM), (nn.GRU, GRU), (nn.RNN, RNN))
    ),
)

CELLS = (
    *(
        trained(
            f"{kind.__name__}",
            layer(lambda kind=kind: kind(inputs, hidden), leaf(batch, inputs)),
            stepwise(gates, rows=batch),
        )
        for kind, gates in ((nn.LSTMCell, LSTM), (nn.GRUCell, GRU), (nn.RNNCell, RNN))
    ),
    trained(
        "LSTMCell with a state",
        layer(
            lambda: nn.LSTMCell(inputs, hidden),
            leaf(batch, inputs),
            [leaf(batch, hidden), leaf(batch, hidden)],
        ),
        fused(LSTM, rows=batch),
    ),
    trained(
        "GRUCell with a state",
        layer(lambda: nn.GRUCell(inputs, hidden), leaf(batch, inputs), leaf(batch, hidden)),
        fused(GRU, rows=batch),
    ),
)

CASES = (*FUSED, *STEPWISE, *CELLS)
