"""Formulas for mamba-ssm and causal-conv1d: scans, and short convolutions over time.

A selective scan is a recurrence, in which each state needs the previous state. Therefore its work
counts as FLOPs and not as MACs. A state costs 8 operations per time step: the step size times A,
the exponential of this product, the step size times B times the input (2), a product with the
previous state and a sum (2), and a product with C and a sum (2).

The chunked scan of Mamba 2 divides the sequence into chunks. It consists of matmuls, which count as
MACs. Within a chunk, all pairs of time steps are multiplied with each other, as in attention. A
chunk depends on earlier chunks only through their states.
"""

from math import prod

from lflops.formulas.table import Cost, Shape, formula, function_formula, per_element

SCAN = 8
"""Number of operations of a selective scan, per state and time step."""

STATES = 6
"""Number of operations for recomputing a selective scan in backward, per state and time step.

Forward does not keep the states, so backward repeats all operations in `SCAN` except the 2
operations with C.
"""


@function_formula("selective_scan_cuda:fwd")
def selective_scan(
    u: Shape,
    delta: Shape,
    a: Shape,
    b: Shape,
    c: Shape,
    d: Shape | None,
    z: Shape | None,
    delta_bias: Shape | None,
    softplus: object,
) -> Cost:
    """Cost of a selective scan of `u` [batch, channels, length], where `a` is [channels, states].

    Optional parts add operations per element of `u`: 2 for D (`d`), 2 for a gate (`z`), 1 for a
    bias (`delta_bias`), and 1 for a softplus.
    """
    states = a[-1]
    operations = SCAN * states + bool(softplus)
    if d is not None:
        operations += 2
    if z is not None:
        operations += 2
    if delta_bias is not None:
        operations += 1
    return Cost(other_flops=operations * prod(u))


@function_formula("selective_scan_cuda:bwd")
def selective_scan_backward(
    u: Shape,
    delta: Shape,
    a: Shape,
    b: Shape,
    c: Shape,
    d: Shape | None,
    z: Shape | None,
    delta_bias: Shape | None,
    grad: Shape,
) -> Cost:
    """Cost of the gradients of a selective scan: twice the cost of forward.

    In addition, backward recomputes the states.
    """
    states = a[-1]
    # The formula does not receive the argument for the softplus. A softplus is assumed if there is
    # a bias.
    forward = selective_scan(u, delta, a, b, c, d, z, delta_bias, softplus=delta_bias)
    recompute = Cost(other_flops=prod(u) * states * STATES)
    return Cost(other_flops=2 * forward.other_flops, recompute=recompute)


def _convolution_macs(x: Shape, weight: Shape) -> int:
    """MACs of convolving each channel of [batch, channels, length] with a row of the weight.

    The weight has the shape [channels, width].
    """
    return prod(x) * weight[-1]


@formula("DaoAILab::_causal_conv1d_fwd_cpp")
def causal_convolution(
    x: Shape, weight: Shape, bias: Shape | None, *, silu_activation: bool
) -> Cost:
    """Cost of a causal convolution of each channel, with an optional bias and an optional SiLU."""
    operations = (bias is not None) + bool(silu_activation)
    return Cost(_convolution_macs(x, weight), other_flops=operations * prod(x))


@formula("DaoAILab::_causal_conv1d_bwd_cpp")
def causal_convolution_backward(
    x: Shape, weight: Shape, bias: Shape | None, *, silu_activation: bool
) -> Cost:
    """Cost of the gradients of a causal convolution: of its input, weight and bias.

    If there is a SiLU, its input is recomputed.
    """
    macs = _convolution_macs(x, weight)
    operations = (bias is not None) + bool(silu_activation)
    recompute = Cost(macs) if silu_activation else None
    return Cost(
        macs=2 * macs,
        other_flops=operations * prod(x),
        recompute=recompute,
    )


@formula("DaoAILab::_causal_conv1d_update_cpp")
def causal_convolution_step(
    x: Shape, state: Shape, weight: Shape, bias: Shape | None, *, silu_activation: bool
) -> Cost:
    """Cost of a causal convolution for one new time step, as in text generation."""
    return causal_convolution(x, weight, bias, silu_activation=silu_activation)


@function_formula("causal_conv1d_cuda:causal_conv1d_fwd")
def older_causal_convolution(
    x: Shape,
    weight: Shape,
    bias: Shape | None,
    seq_idx: object,
    states: object,
    out: object,
    last: object,
    silu: object,
) -> Cost:
    """Cost of `causal_convolution` in older releases, where it is not a torch operator."""
    return causal_convolution(x, weight, bias, silu_activation=bool(silu))


@function_formula("causal_conv1d_cuda:causal_conv1d_bwd")
def older_causal_convolution_backward(
    x: Shape, weight: Shape, bias: Shape | None, grad: Shape, *rest: object
) -> Cost:
    """Cost of `causal_convolution_backward` in older releases.

    If the last argument is true, the convolution has a SiLU.
    """
    has_silu = bool(rest) and rest[-1] is True
    return causal_convolution_backward(x, weight, bias, silu_activation=has_silu)


SSD = "mamba_ssm.ops.triton.ssd_combined:"
"""The module in which the chunked scan looks up its kernels.

In the formulas for these kernels, x is [batch, length, heads, width], B and C are [batch, length,
groups, states], and the step sizes `dt` are [batch, heads, chunks, steps].
"""


def _pairs_by_width(x: Shape, dt: Shape) -> int:
    """Return the MACs of multiplying [steps, steps] matrices by x, over all chunks and heads.

    Such a matrix, for example C x B, has one element for each pair of time steps of a chunk.
    """
    steps = dt[-1]
    width = x[-1]
    return prod(dt) * steps * width


@function_formula(f"{SSD}_bmm_chunk_fwd", again_in_backward=True)
def pairs_of_a_chunk(a: Shape, b: Shape, chunk_size: int) -> Cost:
    """Cost of the matmuls C x B of all chunks, where `a` is C and `b` is B.

    Each pair of time steps of a chunk needs the dot product of a row of C and a row of B. The last
    chunk is padded, so it costs as much as the other chunks.
    """
    batch, length, *groups, states = a
    chunks = -(-length // chunk_size)
    return Cost(batch * chunks * prod(groups) * chunk_size**2 * states)


@function_formula(f"{SSD}_bmm_chunk_bwd")
def pairs_of_a_chunk_backward(a: Shape, grad: Shape) -> Cost:
    """Cost of the gradient of either B or C, computed from the gradient of C x B."""
    states = a[-1]
    return Cost(prod(grad) * states)


@function_formula(f"{SSD}_chunk_state_fwd", again_in_backward=True)
def chunk_state(b: Shape, x: Shape) -> Cost:
    """Cost of the states at the ends of all chunks.

    The state of a chunk is the sum of x times B over the time steps of the chunk.
    """
    states = b[-1]
    return Cost(prod(x) * states)


@function_formula(f"{SSD}_chunk_scan_fwd")
def chunk_scan(cb: Shape, x: Shape, dt: Shape, decay: Shape, c: Shape) -> Cost:
    """Cost of the result of a chunked scan: C x B of each chunk times x, plus C times the states.

    A time step needs only the pairs with earlier time steps and with itself. On average, these are
    (steps + 1) / 2 pairs per time step. Only these pairs count as executed MACs.
    """
    states = c[-1]
    steps = dt[-1]
    by_states = prod(x) * states
    by_pairs = _pairs_by_width(x, dt)
    by_earlier_pairs = by_pairs * (steps + 1) // (2 * steps)
    return Cost(macs=by_pairs + by_states, executed_macs=by_earlier_pairs + by_states)


@function_formula(f"{SSD}_chunk_scan_bwd_dstates", f"{SSD}_chunk_scan_bwd_dC")
def states_gradient(other: Shape, decay: Shape, grad: Shape) -> Cost:
    """Cost of a kernel that computes the gradient of the states, or the gradient of C.

    Both kernels have the same cost. The first kernel multiplies C by the gradient of the result,
    and the second kernel multiplies the gradient of the result by the states.
    """
    states = other[-1]
    return Cost(prod(grad) * states)


@function_formula(f"{SSD}_chunk_scan_chunk_state_bwd_dx")
def input_gradient(x: Shape, dt: Shape, decay: Shape, b: Shape) -> Cost:
    """Cost of the gradient of x in a chunked scan.

    The gradient is the sum of two matmuls. One multiplies the product of C and B of each chunk by
    the gradient of the result, and the other one multiplies B by the gradient of the states.
    """
    states = b[-1]
    return Cost(_pairs_by_width(x, dt) + prod(x) * states)


@function_formula(f"{SSD}_chunk_state_bwd_db")
def b_gradient(x: Shape, dt: Shape, decay: Shape, states: Shape) -> Cost:
    """Cost of the gradient of B in a chunked scan: x times the gradient of the states.

    The gradient of the states has the shape [batch, chunks, heads, width, states].
    """
    return Cost(prod(x) * states[-1])


@function_formula(f"{SSD}_chunk_scan_bwd_dcb")
def pairs_gradient(x: Shape, dt: Shape, decay: Shape, grad: Shape) -> Cost:
    """Cost of the gradient of the product of C and B in each chunk.

    The gradient of the result is multiplied by the input `x`.
    """
    return Cost(_pairs_by_width(x, dt))


@function_formula(f"{SSD}_chunk_scan_bwd_ddAcs_stable")
def decay_gradient(x: Shape, dt: Shape, decay: Shape, grad: Shape) -> Cost:
    """Cost of the gradient of the decay in a chunked scan.

    The kernel runs the matmul of `pairs_gradient` again, so its MACs count as recomputation.
    """
    return Cost(recompute=Cost(_pairs_by_width(x, dt)))


# One product and one sum per element.
function_formula(f"{SSD}_chunk_cumsum_fwd", f"{SSD}_state_passing_fwd", again_in_backward=True)(
    per_element(2)
)
function_formula(f"{SSD}_chunk_cumsum_bwd", f"{SSD}_state_passing_bwd", f"{SSD}_chunk_scan_bwd_dz")(
    per_element(4)
)
