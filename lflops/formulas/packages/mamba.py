"""Formulas for mamba-ssm and causal-conv1d: scans, and short convolutions over time.

A selective scan is a recurrence, in which each state needs the previous state. Therefore it counts
as FLOPs and not as MACs. A state costs 8 operations per step: the step size times A, its
exponential, the step size times B times the input (2), the product with the state and a sum (2),
and the product with C and its sum (2).

The chunked scan of Mamba 2 consists of matmuls, which count as MACs. They multiply all pairs of
steps of a chunk, and chunks with states.
"""

from math import prod

from lflops.formulas.table import Cost, Shape, formula, function_formula, per_element

SCAN = 8
"""Operations of a scan, per state and step."""

STATES = 6
"""Operations that backward repeats to obtain the states, per state and step."""


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
    """Cost of a scan of [batch, channels, length] with A as [channels, states].

    Per element, D adds 2 operations, a gate adds 2, a bias adds 1, and a softplus adds 1.
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
    """Cost of twice the forward pass, and of the recomputed states."""
    states = a[-1]
    forward = selective_scan(u, delta, a, b, c, d, z, delta_bias, softplus=delta_bias)
    recompute = Cost(other_flops=prod(u) * states * STATES)
    return Cost(other_flops=2 * forward.other_flops, recompute=recompute)


def _convolution_macs(x: Shape, weight: Shape) -> int:
    """MACs of [batch, channels, length], where each channel is convolved with a row of the weight.

    The weight is [channels, width].
    """
    return prod(x) * weight[-1]


@formula("DaoAILab::_causal_conv1d_fwd_cpp")
def causal_convolution(
    x: Shape, weight: Shape, bias: Shape | None, *, silu_activation: bool
) -> Cost:
    """Cost of a convolution of each channel, with optional bias and SiLU."""
    operations = (bias is not None) + bool(silu_activation)
    return Cost(_convolution_macs(x, weight), other_flops=operations * prod(x))


@formula("DaoAILab::_causal_conv1d_bwd_cpp")
def causal_convolution_backward(
    x: Shape, weight: Shape, bias: Shape | None, *, silu_activation: bool
) -> Cost:
    """Cost of the gradients of the input and of the weight.

    The input of a SiLU is recomputed.
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
    """Cost of the convolution of one additional step."""
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
    """Cost of `causal_convolution` in older releases, which call it outside the dispatcher."""
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

In the formulas, x is [batch, length, heads, width], B and C are [batch, length, groups, states],
and the step sizes `dt` are [batch, heads, chunks, steps].
"""


def _pairs_by_width(x: Shape, dt: Shape) -> int:
    """Count all pairs of steps of each chunk and head, times the width."""
    steps = dt[-1]
    width = x[-1]
    return prod(dt) * steps * width


@function_formula(f"{SSD}_bmm_chunk_fwd", again_in_backward=True)
def pairs_of_a_chunk(a: Shape, b: Shape, chunk_size: int) -> Cost:
    """Cost of C x B for each chunk.

    The last chunk is padded.
    """
    batch, length, *groups, states = a
    chunks = -(-length // chunk_size)
    return Cost(batch * chunks * prod(groups) * chunk_size**2 * states)


@function_formula(f"{SSD}_bmm_chunk_bwd")
def pairs_of_a_chunk_backward(a: Shape, grad: Shape) -> Cost:
    """Cost of the gradient of B or of C."""
    states = a[-1]
    return Cost(prod(grad) * states)


@function_formula(f"{SSD}_chunk_state_fwd", again_in_backward=True)
def chunk_state(b: Shape, x: Shape) -> Cost:
    """Cost of X x B over each chunk, for each head."""
    states = b[-1]
    return Cost(prod(x) * states)


@function_formula(f"{SSD}_chunk_scan_fwd")
def chunk_scan(cb: Shape, x: Shape, dt: Shape, decay: Shape, c: Shape) -> Cost:
    """Cost of the pairs of a chunk times x, and of C times the states.

    A step needs only the pairs with earlier steps and with itself. On average, that is (steps+1)/2
    of `steps` pairs.
    """
    states = c[-1]
    steps = dt[-1]
    by_states = prod(x) * states
    by_pairs = _pairs_by_width(x, dt)
    by_earlier_pairs = by_pairs * (steps + 1) // (2 * steps)
    return Cost(macs=by_pairs + by_states, executed_macs=by_earlier_pairs + by_states)


@function_formula(f"{SSD}_chunk_scan_bwd_dstates", f"{SSD}_chunk_scan_bwd_dC")
def states_gradient(other: Shape, decay: Shape, grad: Shape) -> Cost:
    """Cost of C x the gradient, for the states; or of the gradient x the states, for C."""
    states = other[-1]
    return Cost(prod(grad) * states)


@function_formula(f"{SSD}_chunk_scan_chunk_state_bwd_dx")
def input_gradient(x: Shape, dt: Shape, decay: Shape, b: Shape) -> Cost:
    """Cost of the pairs of a chunk times the gradient, and of B times the gradient of the states."""
    states = b[-1]
    return Cost(_pairs_by_width(x, dt) + prod(x) * states)


@function_formula(f"{SSD}_chunk_state_bwd_db")
def b_gradient(x: Shape, dt: Shape, decay: Shape, states: Shape) -> Cost:
    """Cost of X x the gradient of the states, [batch, chunks, heads, width, states]."""
    return Cost(prod(x) * states[-1])


@function_formula(f"{SSD}_chunk_scan_bwd_dcb")
def pairs_gradient(x: Shape, dt: Shape, decay: Shape, grad: Shape) -> Cost:
    """Cost of the gradient x X for each chunk."""
    return Cost(_pairs_by_width(x, dt))


@function_formula(f"{SSD}_chunk_scan_bwd_ddAcs_stable")
def decay_gradient(x: Shape, dt: Shape, decay: Shape, grad: Shape) -> Cost:
    """Cost of the product in `pairs_gradient`, recomputed for the gradient of the decay."""
    return Cost(recompute=Cost(_pairs_by_width(x, dt)))


# One product and one sum per element.
function_formula(f"{SSD}_chunk_cumsum_fwd", f"{SSD}_state_passing_fwd", again_in_backward=True)(
    per_element(2)
)
function_formula(f"{SSD}_chunk_cumsum_bwd", f"{SSD}_state_passing_bwd", f"{SSD}_chunk_scan_bwd_dz")(
    per_element(4)
)
