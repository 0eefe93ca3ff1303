"""What people's models call, each once: names of functions, and expressions on a few tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def between(low: float, high: float, *shape: int) -> Tensor:
    """Random numbers that want a gradient."""
    return (torch.rand(*shape) * (high - low) + low).requires_grad_()


X = between(0.1, 0.9, 4, 6)
"""A matrix on which every function here is defined."""
SQUARE = (torch.eye(4) * 2 + 0.1).requires_grad_()
LINE, IMAGE, BLOCK = between(-1, 1, 2, 4, 8), between(-1, 1, 2, 4, 8, 8), between(-1, 1, 2, 4, 4, 4, 4)
TABLE = between(-1, 1, 9, 6)
QUERY = between(-1, 1, 2, 2, 5, 8)
SEQUENCE = between(-1, 1, 2, 5, 8)
CLASSES, PLACES, INDICES = torch.tensor([0, 2, 5, 1]), torch.tensor([2, 0, 1]), torch.tensor([[0, 1], [2, 3], [5, 4], [1, 1]])
MASK = X.detach() > 0.5
WHOLE = torch.arange(24).view(4, 6)

UNARY = (
    "abs acos acosh angle asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor frac i0 isfinite isinf"
    " isnan isneginf isposinf isreal lgamma log log10 log1p log2 logical_not logit nan_to_num neg positive rad2deg reciprocal relu round"
    " rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc"
)
SPECIAL = "bessel_j0 bessel_j1 entr erfcx i0e i1 i1e log_ndtr ndtr ndtri"
ACTIVATIONS = (
    "celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 rrelu selu sigmoid silu softplus"
    " softshrink softsign tanh tanhshrink"
)
BINARY = (
    "add atan2 copysign div eq float_power fmax fmin fmod ge gt hypot isclose ldexp le logaddexp logaddexp2 logical_and logical_or"
    " logical_xor lt maximum minimum mul ne nextafter pow remainder rsub sub true_divide xlogy"
)
REDUCTIONS = (
    "all amax amin aminmax any argmax argmin argsort count_nonzero max mean median min nanmean nanmedian nansum norm prod sort std std_mean"
    " sum trace var var_mean"
)
ALONG = "cummax cummin cumprod cumsum logcumsumexp logsumexp softmax log_softmax topk unbind sum mean std var max min argmax median diff"

PRODUCTS: dict[str, Callable[[], Any]] = {
    "linear": lambda: F.linear(X, TABLE, TABLE[:, 0]),
    "matmul": lambda: X @ X.t(),
    "mv": lambda: X.mv(X[0]),
    "dot": lambda: X[0].dot(X[1]),
    "vdot": lambda: torch.vdot(X[0], X[1]),
    "outer": lambda: torch.outer(X[0], X[1]),
    "inner": lambda: torch.inner(X, X),
    "addr": lambda: torch.addr(X, X[:, 0], X[0]),
    "einsum": lambda: torch.einsum("ij,kj->ik", X, X),
    "tensordot": lambda: torch.tensordot(X, X.t(), 1),
    "kron": lambda: torch.kron(X, SQUARE),
    "multi_dot": lambda: torch.linalg.multi_dot([X, X.t(), X]),
    "matrix_power": lambda: torch.linalg.matrix_power(SQUARE, 3),
    "cov": lambda: (torch.cov(X), torch.corrcoef(X)),
    "bilinear": lambda: F.bilinear(X, X, between(-1, 1, 3, 6, 6)),
    "cdist": lambda: torch.cdist(X, X),
    "pdist": lambda: F.pdist(X),
    "convolutions": lambda: (
        F.conv1d(LINE, between(-1, 1, 3, 4, 3)),
        F.conv2d(IMAGE, between(-1, 1, 3, 4, 3, 3)),
        F.conv3d(BLOCK, between(-1, 1, 3, 4, 2, 2, 2)),
        F.conv_transpose2d(IMAGE, between(-1, 1, 4, 3, 2, 2)),
    ),
    "a convolution over time": lambda: torch.conv_tbc(SEQUENCE, between(-1, 1, 1, 8, 3), X[0, :3]),
    "unfold": lambda: F.fold(F.unfold(IMAGE, 3), (8, 8), 3),
    "attention": lambda: F.scaled_dot_product_attention(QUERY, QUERY, QUERY),
    "bag": lambda: (
        F.embedding_bag(INDICES, TABLE),
        F.embedding_bag(INDICES, TABLE, mode="max"),
        F.embedding_bag(INDICES, TABLE, mode="sum"),
    ),
    "embedding": lambda: F.embedding(INDICES, TABLE),
    "embedding, sparse": lambda: F.embedding(INDICES, TABLE, sparse=True),
    "embedding, renormed": lambda: F.embedding(INDICES, TABLE.detach(), max_norm=1.0),
    "lstm": lambda: nn.LSTM(8, 5)(SEQUENCE)[0],
    "gru": lambda: nn.GRU(8, 5, 2, bidirectional=True)(SEQUENCE)[0],
    "rnn": lambda: nn.RNN(8, 5)(SEQUENCE)[0],
    "cells": lambda: (nn.LSTMCell(6, 5)(X)[0], nn.GRUCell(6, 5)(X)),
    "multi-head": lambda: nn.MultiheadAttention(8, 2)(SEQUENCE, SEQUENCE, SEQUENCE)[0],
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16)(SEQUENCE),
    "decoder": lambda: nn.TransformerDecoderLayer(8, 2, 16)(SEQUENCE, SEQUENCE),
}

NORMS: dict[str, Callable[[], Any]] = {
    "layer": lambda: F.layer_norm(X, (6,), X[0], X[1]),
    "root mean square": lambda: F.rms_norm(X, (6,), X[0]),
    "group": lambda: F.group_norm(IMAGE, 2, IMAGE[0, :, 0, 0], IMAGE[1, :, 0, 0]),
    "instance": lambda: F.instance_norm(IMAGE),
    "batch": lambda: (F.batch_norm(X, torch.zeros(6), torch.ones(6), training=True), F.batch_norm(X, torch.zeros(6), torch.ones(6))),
    "local response": lambda: F.local_response_norm(IMAGE, 2),
    "normalize": lambda: F.normalize(X),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))(X),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))(X),
    "vector norms": lambda: (
        torch.linalg.vector_norm(X),
        torch.linalg.vector_norm(X, 1),
        torch.linalg.matrix_norm(X),
        torch.dist(X, X.flip(0)),
    ),
    "similarity": lambda: (F.cosine_similarity(X, X.flip(0)), F.pairwise_distance(X, X.flip(0))),
    "softmax": lambda: (
        F.softmax(X, -1),
        F.log_softmax(X, -1),
        F.softmin(X, -1),
        F.gumbel_softmax(X),
        F.softmax(X, -1, dtype=torch.float64),
    ),
    "dropout": lambda: (F.dropout(X), F.dropout2d(IMAGE), F.alpha_dropout(X, 0.5, True), F.feature_alpha_dropout(X, 0.5, True)),
    "renorm": lambda: torch.renorm(X, 2, 0, 1.0),
    "clipping": lambda: (nn.utils.clip_grad_norm_([SQUARE], 1.0), X.clamp(0.2, 0.7), X.clamp(X.detach() - 1, X.detach())),
}

WINDOWS: dict[str, Callable[[], Any]] = {
    "max": lambda: (F.max_pool1d(LINE, 2), F.max_pool2d(IMAGE, 2), F.max_pool3d(BLOCK, 2)),
    "mean": lambda: (F.avg_pool1d(LINE, 2), F.avg_pool2d(IMAGE, 2), F.avg_pool3d(BLOCK, 2)),
    "mean to a size": lambda: (F.adaptive_avg_pool1d(LINE, 2), F.adaptive_avg_pool2d(IMAGE, 2), F.adaptive_avg_pool3d(BLOCK, 2)),
    "mean of all": lambda: F.adaptive_avg_pool2d(IMAGE, 1),
    "max to a size": lambda: (F.adaptive_max_pool1d(LINE, 2), F.adaptive_max_pool2d(IMAGE, 2), F.adaptive_max_pool3d(BLOCK, 2)),
    "powers": lambda: F.lp_pool2d(IMAGE, 2.0, 2),
    "fractional": lambda: (F.fractional_max_pool2d(IMAGE, 2, 3), F.fractional_max_pool3d(BLOCK, 2, 2)),
    "unpooling": lambda: F.max_unpool2d(*F.max_pool2d(IMAGE, 2, return_indices=True), (2, 2)),
    "nearest": lambda: [F.interpolate(each, scale_factor=2.0) for each in (LINE, IMAGE, BLOCK)],
    "nearest, exactly": lambda: [F.interpolate(each, scale_factor=2.0, mode="nearest-exact") for each in (LINE, IMAGE, BLOCK)],
    "linear": lambda: [F.interpolate(a, size=7, mode=mode) for a, mode in ((LINE, "linear"), (IMAGE, "bilinear"), (BLOCK, "trilinear"))],
    "cubic": lambda: F.interpolate(IMAGE, size=7, mode="bicubic"),
    "smoothed": lambda: [F.interpolate(IMAGE, size=5, mode=mode, antialias=True) for mode in ("bilinear", "bicubic")],
    "area": lambda: F.interpolate(IMAGE, size=4, mode="area"),
    "by a grid": lambda: F.grid_sample(IMAGE, between(-1, 1, 2, 4, 4, 2), align_corners=False),
    "by a grid in a block": lambda: F.grid_sample(BLOCK, between(-1, 1, 2, 4, 4, 4, 3), align_corners=False),
    "a grid": lambda: F.affine_grid(between(-1, 1, 2, 2, 3), [2, 4, 8, 8], align_corners=False),
    "shuffles": lambda: (F.pixel_shuffle(IMAGE, 2), F.pixel_unshuffle(IMAGE, 2), F.channel_shuffle(IMAGE, 2)),
    "padding": lambda: [F.pad(LINE, (1, 1), mode=mode) for mode in ("constant", "reflect", "replicate", "circular")],
    "padding of images": lambda: [F.pad(IMAGE, (1, 1, 1, 1), mode=mode) for mode in ("constant", "reflect", "replicate", "circular")],
}

LOSSES: dict[str, Callable[[], Any]] = {
    "mse": lambda: F.mse_loss(X, X.detach()),
    "l1": lambda: F.l1_loss(X, X.detach()),
    "smooth l1": lambda: F.smooth_l1_loss(X, X.detach()),
    "huber": lambda: F.huber_loss(X, X.detach()),
    "binary": lambda: F.binary_cross_entropy(X, X.detach()),
    "binary of logits": lambda: F.binary_cross_entropy_with_logits(X, X.detach()),
    "cross entropy": lambda: F.cross_entropy(X, CLASSES),
    "cross entropy, smoothed": lambda: F.cross_entropy(X, CLASSES, label_smoothing=0.1),
    "cross entropy of probabilities": lambda: F.cross_entropy(X, X.detach()),
    "cross entropy of images": lambda: F.cross_entropy(IMAGE, torch.zeros(2, 8, 8, dtype=torch.long)),
    "nll": lambda: F.nll_loss(X, CLASSES),
    "kl": lambda: F.kl_div(X, X.detach(), reduction="batchmean"),
    "poisson": lambda: F.poisson_nll_loss(X, X.detach()),
    "gaussian": lambda: F.gaussian_nll_loss(X, X.detach(), X.detach()),
    "hinge": lambda: F.hinge_embedding_loss(X, torch.ones(4, 6)),
    "margin ranking": lambda: F.margin_ranking_loss(X[0], X[1], torch.ones(6)),
    "multi margin": lambda: F.multi_margin_loss(X, CLASSES),
    "multilabel soft margin": lambda: F.multilabel_soft_margin_loss(X, torch.ones(4, 6)),
    "soft margin": lambda: F.soft_margin_loss(X, torch.ones(4, 6)),
    "triplet": lambda: F.triplet_margin_loss(X, X.flip(0), X.flip(1)),
    "cosine": lambda: F.cosine_embedding_loss(X, X.flip(0), torch.ones(4)),
}

MOVES: dict[str, Callable[[], Any]] = {
    "joining": lambda: (torch.cat([X, X]), torch.stack([X, X]), torch.block_diag(X, X), torch.cartesian_prod(X[0], X[1])),
    "parting": lambda: (X.chunk(2)[0], X.split(2)[1], X.unflatten(1, (2, 3)), X.narrow(0, 0, 2), X.unfold(1, 2, 1), X.movedim(0, 1)),
    "copying": lambda: (X.clone(), X.repeat(2, 1), X.repeat_interleave(2, 0), X.tile(2), X.expand(2, 4, 6), X.t().contiguous()),
    "turning": lambda: (X.flip(0), X.roll(1, 0), torch.rot90(X), X.permute(1, 0), X.swapaxes(0, 1)),
    "gathering": lambda: (
        X.gather(1, INDICES),
        X.index_select(0, PLACES),
        X[PLACES],
        X[MASK],
        X.take(PLACES),
        torch.take_along_dim(X, INDICES, 1),
    ),
    "scattering": lambda: (
        X.scatter(1, INDICES, 1.0),
        X.index_copy(0, PLACES, X[:3]),
        X.index_fill(0, PLACES, 1.0),
        X.put(PLACES, X[0, :3]),
    ),
    "adding in place": lambda: (
        X.scatter_add(1, INDICES, X[:, :2]),
        X.index_add(0, PLACES, X[:3]),
        X.index_put((PLACES,), X[:3], accumulate=True),
    ),
    "reducing in place": lambda: (X.scatter_reduce(1, INDICES, X[:, :2], "amax"), X.index_reduce(0, PLACES, X[:3], "amax")),
    "masking": lambda: (X.masked_fill(MASK, 0.0), torch.where(MASK, X, -X), X.masked_scatter(MASK, X), X.tril(), X.triu()),
    "pieces in place": lambda: (X.select_scatter(X[0], 0, 1), X.slice_scatter(X[:2], 0, 0, 2), X.diagonal_scatter(X[0, :4])),
    "diagonals": lambda: (torch.diag(X[0]), torch.diag_embed(X), X.diagonal()),
    "converting": lambda: (X.to(torch.bfloat16), X.double(), X.half()),
    "complex": lambda: (torch.complex(X, X).abs(), torch.polar(X, X).real, torch.view_as_complex(X.view(4, 3, 2)).abs()),
    "counting": lambda: (
        torch.bincount(WHOLE[0]),
        torch.bucketize(X, X.detach()[0].sort()[0]),
        torch.isin(WHOLE, PLACES),
        torch.nonzero(MASK),
    ),
    "finding": lambda: (
        X.detach().unique(),
        X.detach().unique_consecutive(),
        torch.searchsorted(X.detach()[0].sort()[0], X),
        X.kthvalue(2),
    ),
    "histograms": lambda: (X.histc(4), torch.histogram(X.detach(), 4)[0], X.quantile(0.3), X.nanquantile(0.3), X.mode()),
    "drawing": lambda: (torch.rand(3), torch.randn_like(X), torch.randint(9, (3,)), torch.randperm(5), X.bernoulli(), X.multinomial(2)),
    "making": lambda: (
        torch.arange(5),
        torch.linspace(0, 1, 5),
        torch.eye(5),
        torch.full((3,), 2.0),
        torch.tril_indices(3, 3),
        F.one_hot(CLASSES),
    ),
    "windows": lambda: (torch.hann_window(8), torch.hamming_window(8), torch.kaiser_window(8)),
    "whole numbers": lambda: (WHOLE & 3, WHOLE | 1, ~WHOLE, WHOLE << 1, torch.gcd(WHOLE, WHOLE), WHOLE // 2, WHOLE % 3),
    "comparing": lambda: (torch.equal(X, X), torch.allclose(X, X), torch.gradient(X)[0], torch.trapezoid(X)),
    "meshes": lambda: torch.stack(torch.meshgrid(X[0], X[1], indexing="ij")),
    "jagged": lambda: torch.nested.as_nested_tensor([X, X], layout=torch.jagged).sin().values(),
    "segments": lambda: torch.segment_reduce(X, "sum", lengths=torch.tensor([2, 2])),
    "weights": lambda: (torch.lerp(X, X, 0.3), torch.addcmul(X, X, X), torch.addcdiv(X, X, X), F.prelu(X, X[0]), F.threshold(X, 0.5, 0.0)),
    "in place": lambda: (
        X.clone().add_(1).mul_(2).relu_(),
        X.clone().copy_(X),
        X.clone().fill_(1.0),
        X.clone().zero_(),
        X.clone().clamp_(0),
    ),
    "reading a number": lambda: (X.sum().item(), X.detach().tolist(), bool((X > 0).all())),
    "a loaded array": lambda: torch.tensor([[1.0, 2.0]]) * torch.as_tensor(3.0),
}

EXPRESSIONS = {"product": PRODUCTS, "norm": NORMS, "window": WINDOWS, "loss": LOSSES, "move": MOVES}

UNKNOWN_YET: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "fake quantization": (lambda: torch.fake_quantize_per_tensor_affine(X, 0.1, 0, 0, 255), {"fake_quantize_per_tensor_affine_cachemask"}),
    "singular values": (lambda: torch.linalg.svdvals(X), {"_linalg_svd"}),
    "an inverse": (lambda: torch.linalg.inv(SQUARE), {"linalg_inv_ex"}),
    "a determinant": (lambda: torch.linalg.det(SQUARE), {"_linalg_det", "linalg_lu_solve"}),
    "a solution": (lambda: torch.linalg.solve(SQUARE, X), {"_linalg_solve_ex", "linalg_lu_solve"}),
    "Cholesky's factor": (lambda: torch.linalg.cholesky(SQUARE @ SQUARE.t()), {"linalg_cholesky_ex", "linalg_solve_triangular"}),
    "an orthogonal factor": (lambda: torch.linalg.qr(SQUARE)[1], {"linalg_qr", "linalg_solve_triangular"}),
    "eigenvalues": (lambda: torch.linalg.eigvalsh(SQUARE), {"_linalg_eigh"}),
    "an exponential of a matrix": (lambda: torch.linalg.matrix_exp(SQUARE), {"linalg_matrix_exp"}),
    "a loss over alignments": (
        lambda: F.ctc_loss(LINE.permute(2, 0, 1).log_softmax(-1), torch.ones(2, 3).long(), torch.tensor([8, 8]), torch.tensor([3, 3])),
        {"_ctc_loss", "_ctc_loss_backward"},
    ),
    "a loss over several labels": (
        lambda: F.multilabel_margin_loss(X, WHOLE % 6),
        {"multilabel_margin_loss_forward", "multilabel_margin_loss_backward"},
    ),
}
