"""Formulas for recurrent layers that run as one kernel.

At each time step, each weight matrix is multiplied by a vector. These products are the MACs. The
other operations are an addition for each bias, and the pointwise functions and sums of the gates.
A layer that runs as many kernels has the same MACs and other operations.
"""

from collections.abc import Sequence
from math import prod

from lflops.formulas.table import Cost, Shape, adapted, formula, per_element

# torch's numbers for the kinds of cells.
RELU, TANH, LSTM, GRU = range(4)

GATE_OPERATIONS = {RELU: 2, TANH: 2, LSTM: 13, GRU: 10}
"""Number of operations per hidden unit and time step, without matmuls and biases."""

GATES = {LSTM: 4, GRU: 3}
"""Number of gates of a cell. Each gate has one row in the weights for each hidden unit."""


def recurrent(
    x: Shape, weights: Sequence[Shape], *, cells: int, mode: int, hidden: int, passes: int = 1
) -> Cost:
    """Cost of a recurrent network with all its layers and directions.

    Args:
        x: Shape of the input: [time, batch, width], or [vectors, width] if packed.
        weights: Shapes of the matrices and biases of all cells.
        cells: Number of cells: the number of layers times the number of directions.
        mode: Kind of the cells: `RELU`, `TANH`, `LSTM` or `GRU`.
        hidden: Number of hidden units of a cell.
        passes: Cost as a multiple of the cost of forward. It is 1 in forward. In backward, it is 1
            for the gradients of the inputs and hidden states, plus 1 for the gradients of the
            weights.
    """
    steps = passes * prod(x[:-1])
    matrices = 0
    biases = 0
    for weight in weights:
        if len(weight) > 1:
            matrices += prod(weight)
        else:
            biases += prod(weight)
    gates = cells * GATE_OPERATIONS[mode] * hidden
    return Cost(macs=steps * matrices, other_flops=steps * (biases + gates))


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
    """Cost of one recurrent layer in one direction, computed by oneDNN.

    Without biases, the operator receives placeholders as the last two weights.
    """
    weights = [w0, w1]
    if has_biases:
        weights += [w2, w3]
    return recurrent(x, weights, cells=1, mode=mode, hidden=hidden_size)


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
    """Cost of the gradients of one recurrent layer in one direction, computed by oneDNN.

    Every call computes the gradients of the inputs, of the hidden states and of the weights.
    """
    forward = mkldnn_rnn_layer(
        x, w0, w1, w2, w3, mode=mode, hidden_size=hidden_size, has_biases=has_biases
    )
    return Cost(2 * forward.macs, other_flops=2 * forward.other_flops)


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
    """Cost of a recurrent network with all its layers and directions, computed by cuDNN."""
    cells = num_layers * (1 + bidirectional)
    return recurrent(x, weight, cells=cells, mode=mode, hidden=hidden_size)


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
    """Cost of the gradients of a recurrent network, computed by cuDNN.

    The gradients of the weights are included only if they are requested.
    """
    cells = num_layers * (1 + bidirectional)
    passes = 1 + output_mask[-1]
    return recurrent(x, weight, cells=cells, mode=mode, hidden=hidden_size, passes=passes)


def _gates_of_a_step(gates: Shape, mode: int) -> Cost:
    hidden_units = prod(gates) // GATES[mode]
    return Cost(other_flops=hidden_units * GATE_OPERATIONS[mode])


@formula("_thnn_fused_lstm_cell")
def fused_lstm_cell(gates: Shape) -> Cost:
    """Cost of an LSTM cell for one time step, without matmuls and biases.

    The matmuls and biases are separate operators. `gates` has the shape [batch, 4 x hidden].
    """
    return _gates_of_a_step(gates, LSTM)


@formula("_thnn_fused_gru_cell")
def fused_gru_cell(gates: Shape) -> Cost:
    """Cost of a GRU cell for one time step, without matmuls and biases.

    The matmuls and biases are separate operators. `gates` has the shape [batch, 3 x hidden].
    """
    return _gates_of_a_step(gates, GRU)


# Backward costs as much as forward. The operations are counted per element of a tensor [batch,
# hidden]. For a GRU, this is the gradient. For an LSTM, it is the cell state, because the gradients
# of an LSTM are optional arguments.
formula("_thnn_fused_lstm_cell_backward_impl")(
    adapted(per_element(GATE_OPERATIONS[LSTM]), "grad_h grad_c")
)
formula("_thnn_fused_gru_cell_backward")(per_element(GATE_OPERATIONS[GRU]))


@formula("_lstm_mps")
def lstm_mps(
    x: Shape, hx: Sequence[Shape], params: Sequence[Shape], *, num_layers: int, bidirectional: bool
) -> Cost:
    """Cost of an LSTM with all its layers and directions on an Apple GPU."""
    cell_state = hx[1]
    cells = num_layers * (1 + bidirectional)
    return recurrent(x, params, cells=cells, mode=LSTM, hidden=cell_state[-1])


def _quantized(x: Shape, hidden: Shape, *, mode: int, layers: int, bidirectional: bool) -> Cost:
    """Cost of a quantized recurrent network, whose weights are packed.

    The operator does not receive the shapes of packed weights. They are computed from the shapes of
    the input and of the hidden state. The hidden state is [layers x directions, batch, width].
    """
    directions = 1 + bidirectional
    width = hidden[-1]
    rows = GATES[mode] * width
    weights: list[Shape] = []
    for layer in range(layers):
        inputs = directions * width if layer else x[-1]
        weights += [(rows, inputs), (rows, width), (rows,), (rows,)]
    cells = layers * directions
    return recurrent(x, weights * directions, cells=cells, mode=mode, hidden=width)


@formula("quantized_lstm")
def quantized_lstm(x: Shape, *, hx: Sequence[Shape], num_layers: int, bidirectional: bool) -> Cost:
    """Cost of a quantized LSTM with all its layers and directions. Each cell has two biases."""
    return _quantized(x, hx[0], mode=LSTM, layers=num_layers, bidirectional=bidirectional)


@formula("quantized_gru")
def quantized_gru(x: Shape, *, hx: Shape, num_layers: int, bidirectional: bool) -> Cost:
    """Cost of a quantized GRU with all its layers and directions. Each cell has two biases."""
    return _quantized(x, hx, mode=GRU, layers=num_layers, bidirectional=bidirectional)
