"""mamba-ssm and causal-conv1d.

The selective scan, the chunked scan of the second version, and short convolutions over time.

A selective scan is a recurrence, in which each state needs the one before: FLOPs and no MACs. A
state and step cost 8: the step times A, its exponential, the step times B times the input (2), the
state times that and a sum (2), and the products with C (2). The chunked scan is products of
matrices, and MACs: within a chunk each pair of steps, between chunks through the states.
"""

from math import prod

from lflops.formulas.table import Cost, Shape, formula, function_formula, per_element

SCAN, STATES = (
    8,
    6,
    # operations a state and step: of a scan; of what its backward does again to have the states
)


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
    """[batch, channels, length] by [channels, states].

    A product with D is 2 an element, a gate 2, a bias and a softplus 1.
    """
    elements = prod(u)
    each = 2 * (d is not None) + 2 * (z is not None) + (delta_bias is not None) + bool(softplus)
    return Cost(other_flops=elements * (SCAN * a[-1] + each))


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
    """Twice the forward, and the states once more."""
    forward = selective_scan(u, delta, a, b, c, d, z, delta_bias, softplus=delta_bias)
    return Cost(
        other_flops=2 * forward.other_flops, recompute=Cost(other_flops=prod(u) * a[-1] * STATES)
    )


@formula("DaoAILab::_causal_conv1d_fwd_cpp")
def causal_convolution(
    x: Shape, weight: Shape, bias: Shape | None, *, silu_activation: bool
) -> Cost:
    """[batch, channels, length], each channel by its own [channels, width]."""
    return Cost(
        prod(x) * weight[-1], other_flops=prod(x) * ((bias is not None) + bool(silu_activation))
    )


@formula("DaoAILab::_causal_conv1d_bwd_cpp")
def causal_convolution_backward(
    x: Shape, weight: Shape, bias: Shape | None, *, silu_activation: bool
) -> Cost:
    """The gradients of the input and of the weight.

    Before a SiLU's gradient its input is computed again.
    """
    again = Cost(prod(x) * weight[-1]) if silu_activation else None
    return Cost(
        2 * prod(x) * weight[-1],
        other_flops=prod(x) * ((bias is not None) + bool(silu_activation)),
        recompute=again,
    )


@formula("DaoAILab::_causal_conv1d_update_cpp")
def causal_convolution_step(
    x: Shape, state: Shape, weight: Shape, bias: Shape | None, *, silu_activation: bool
) -> Cost:
    """One step more."""
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
    """`causal_convolution` as older releases call it, without the dispatcher."""
    return causal_convolution(x, weight, bias, silu_activation=bool(silu))


@function_formula("causal_conv1d_cuda:causal_conv1d_bwd")
def older_causal_convolution_backward(
    x: Shape, weight: Shape, bias: Shape | None, grad: Shape, *rest: object
) -> Cost:
    """`causal_convolution_backward` as older releases call it; a SiLU is the last argument."""
    return causal_convolution_backward(
        x, weight, bias, silu_activation=bool(rest and rest[-1] is True)
    )


SSD = "mamba_ssm.ops.triton.ssd_combined:"
"""Where the chunked scan calls its parts.

X is [batch, length, heads, width], B and C are [batch, length, groups, states].
"""


@function_formula(f"{SSD}_bmm_chunk_fwd", again_in_backward=True)
def pairs_of_a_chunk(a: Shape, b: Shape, chunk_size: int) -> Cost:
    """C x B of each chunk; the last one is filled up."""
    batch, length, *groups, states = a
    chunks = -(-length // chunk_size)
    return Cost(batch * chunks * prod(groups) * chunk_size**2 * states)


@function_formula(f"{SSD}_bmm_chunk_bwd")
def pairs_of_a_chunk_backward(a: Shape, grad: Shape) -> Cost:
    """One of the two gradients."""
    return Cost(prod(grad) * a[-1])


@function_formula(f"{SSD}_chunk_state_fwd", again_in_backward=True)
def chunk_state(b: Shape, x: Shape) -> Cost:
    """X x B of each head over each chunk."""
    return Cost(prod(x) * b[-1])


@function_formula(f"{SSD}_chunk_scan_fwd")
def chunk_scan(cb: Shape, x: Shape, dt: Shape, decay: Shape, c: Shape) -> Cost:
    """The pairs of a chunk by x, of which a step needs those before it; and C by the state."""
    of_states = prod(x) * c[-1]
    return Cost(
        _by_pairs(x, dt) + of_states, _by_pairs(x, dt) * (dt[-1] + 1) // (2 * dt[-1]) + of_states
    )


def _by_pairs(x: Shape, dt: Shape) -> int:
    """Pairs of steps of each chunk and head, by the width.

    `dt` is [batch, heads, chunks, steps].
    """
    return prod(dt) * dt[-1] * x[-1]


@function_formula(f"{SSD}_chunk_scan_bwd_dstates", f"{SSD}_chunk_scan_bwd_dC")
def states_gradient(other: Shape, decay: Shape, grad: Shape) -> Cost:
    """C x the gradient for the states, the gradient x the states for C."""
    return Cost(prod(grad) * other[-1])


@function_formula(f"{SSD}_chunk_scan_chunk_state_bwd_dx")
def input_gradient(x: Shape, dt: Shape, decay: Shape, b: Shape) -> Cost:
    """The pairs of a chunk by the gradient, and B by that of the states."""
    return Cost(_by_pairs(x, dt) + prod(x) * b[-1])


@function_formula(f"{SSD}_chunk_state_bwd_db")
def b_gradient(x: Shape, dt: Shape, decay: Shape, states: Shape) -> Cost:
    """X x the gradient of the states, [batch, chunks, heads, width, states]."""
    return Cost(prod(x) * states[-1])


@function_formula(f"{SSD}_chunk_scan_bwd_dcb")
def pairs_gradient(x: Shape, dt: Shape, decay: Shape, grad: Shape) -> Cost:
    """The gradient x X of each chunk."""
    return Cost(_by_pairs(x, dt))


@function_formula(f"{SSD}_chunk_scan_bwd_ddAcs_stable")
def decay_gradient(x: Shape, dt: Shape, decay: Shape, grad: Shape) -> Cost:
    """The product of `pairs_gradient` once more, for the gradient of the decay."""
    return Cost(recompute=Cost(_by_pairs(x, dt)))


function_formula(f"{SSD}_chunk_cumsum_fwd", f"{SSD}_state_passing_fwd", again_in_backward=True)(
    per_element(2)
    # a product and a sum
)
function_formula(f"{SSD}_chunk_cumsum_bwd", f"{SSD}_state_passing_bwd", f"{SSD}_chunk_scan_bwd_dz")(
    per_element(4)
)
