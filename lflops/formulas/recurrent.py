"""Recurrent layers as one kernel.

Every weight matrix, of gates, recurrence and projection, multiplies the vector of each time step.

What is not a product costs what it costs operator by operator: an addition for each bias, and the
gates' sums and functions.
"""

from collections.abc import Sequence
from math import prod

from lflops.formulas.table import Cost, Shape, adapted, formula, per_element

GATES = (
    2,
    2,
    13,
    10,
    # operations a hidden unit and step without products and biases, by torch's number for relu, tanh,
    # LSTM, GRU
)


def recurrent(
    x: Shape, weights: Sequence[Shape], *, cells: int, mode: int, hidden: int, times: int = 1
) -> Cost:
    """One cell for each layer and direction, over the vectors of `x`.

    [time, batch, width], or packed [vectors, width].
    """
    steps = times * prod(x[:-1])
    products = sum(prod(weight) for weight in weights if len(weight) > 1)
    biases = sum(prod(weight) for weight in weights if len(weight) == 1)
    return Cost(steps * products, other_flops=steps * (biases + cells * GATES[mode] * hidden))


@formula("mkldnn_rnn_layer")
def mkldnn_rnn_layer(
    x: Shape,
    w0: Shape,
    w1: Shape,
    w2: Shape,
    w3: Shape,
    *,
    mode: int,
    hidden_size: int,
    has_biases: bool,
) -> Cost:
    """One layer in one direction; without biases the last two weights are fillers."""
    return recurrent(
        x, [w0, w1, *([w2, w3] if has_biases else [])], cells=1, mode=mode, hidden=hidden_size
    )


@formula("mkldnn_rnn_layer_backward")
def mkldnn_rnn_layer_backward(
    x: Shape,
    w0: Shape,
    w1: Shape,
    w2: Shape,
    w3: Shape,
    *,
    mode: int,
    hidden_size: int,
    has_biases: bool,
) -> Cost:
    """The gradients of the vectors and of the weights, both always."""
    return recurrent(
        x,
        [w0, w1, *([w2, w3] if has_biases else [])],
        cells=1,
        mode=mode,
        hidden=hidden_size,
        times=2,
    )


@formula("_cudnn_rnn", "miopen_rnn")
def cudnn_rnn(
    x: Shape,
    weight: Sequence[Shape],
    *,
    mode: int,
    hidden_size: int,
    num_layers: int,
    bidirectional: bool,
) -> Cost:
    """All layers and directions."""
    return recurrent(
        x, weight, cells=num_layers * (1 + bidirectional), mode=mode, hidden=hidden_size
    )


@formula("_cudnn_rnn_backward", "miopen_rnn_backward")
def cudnn_rnn_backward(
    x: Shape,
    weight: Sequence[Shape],
    *,
    mode: int,
    hidden_size: int,
    num_layers: int,
    bidirectional: bool,
    output_mask: Sequence[bool],
) -> Cost:
    """The gradients of the vectors always, those of the weights where they are asked for."""
    cells = num_layers * (1 + bidirectional)
    return recurrent(
        x, weight, cells=cells, mode=mode, hidden=hidden_size, times=1 + output_mask[-1]
    )


@formula("_thnn_fused_lstm_cell")
def fused_lstm_cell(gates: Shape) -> Cost:
    """The gates of one step: [batch, 4 hidden].

    Their products and biases are separate operators.
    """
    return Cost(other_flops=prod(gates) // 4 * GATES[2])


@formula("_thnn_fused_gru_cell")
def fused_gru_cell(gates: Shape) -> Cost:
    """The gates of one step: [batch, 3 hidden].

    Their products and biases are separate operators.
    """
    return Cost(other_flops=prod(gates) // 3 * GATES[3])


# As much: [batch, hidden].
formula("_thnn_fused_lstm_cell_backward_impl")(adapted(per_element(GATES[2]), "grad_h grad_c"))
formula("_thnn_fused_gru_cell_backward")(per_element(GATES[3]))


@formula("_lstm_mps")
def lstm_mps(
    x: Shape, hx: Sequence[Shape], params: Sequence[Shape], *, num_layers: int, bidirectional: bool
) -> Cost:
    """All layers and directions, on Apple's GPUs."""
    return recurrent(x, params, cells=num_layers * (1 + bidirectional), mode=2, hidden=hx[1][-1])


def _quantized(
    x: Shape, hidden: Shape, *, gates: int, mode: int, layers: int, directions: int
) -> Cost:
    """Packed weights hide their shapes; the hidden state has [layers x directions, batch, width]."""
    width = hidden[-1]
    weights = [
        (gates * width, inner)
        for layer in range(layers)
        for inner in (x[-1] if not layer else directions * width, width)
    ]
    biases = [(gates * width,)] * (2 * layers)
    return recurrent(
        x, [*weights, *biases] * directions, cells=layers * directions, mode=mode, hidden=width
    )


@formula("quantized_lstm")
def quantized_lstm(x: Shape, *, hx: Sequence[Shape], num_layers: int, bidirectional: bool) -> Cost:
    """All layers and directions, each with two biases."""
    return _quantized(x, hx[0], gates=4, mode=2, layers=num_layers, directions=1 + bidirectional)


@formula("quantized_gru")
def quantized_gru(x: Shape, *, hx: Shape, num_layers: int, bidirectional: bool) -> Cost:
    """All layers and directions, each with two biases."""
    return _quantized(x, hx, gates=3, mode=3, layers=num_layers, directions=1 + bidirectional)
