"""Count kernels of other packages, if they are installed.

Each function runs in a separate process, because other processes may have stand-ins with the same
names.
"""

import importlib
import os
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lflops
from lflops.estimation.changes import add_adapters
from lflops.profile.profile import Profile
from tests.support.count_function import Function, macs
from tests.support.cpu_allocator import allocated

__all__ = ["ADAPTED", "BITSANDBYTES", "FBGEMM", "LIGER", "TORCHAO"]
__all__ += ["adapters_over_four_bits", "bitsandbytes", "fbgemm", "liger", "schemas", "torchao"]

# Linear layers of bitsandbytes.
TOKENS = 6
IN = 64
OUT = 128
BITSANDBYTES = (TOKENS, IN, OUT)

# Width of the layers with adapters.
ADAPTED = 512

# Linear layers of torchao.
ROWS = 16
INNER = 128
OUTER = 256
TORCHAO = (ROWS, INNER, OUTER)

# Jagged tensors and embedding bags of FBGEMM.
LENGTHS = (3, 5, 2)
K = 4
M = 7
BAGS = (2, 3, 1, 3, 3, 2)
WIDTH = 8
FBGEMM = (LENGTHS, K, M, BAGS, WIDTH)

# The head and the loss of Liger Kernel.
WORDS = 6
HIDDEN = 16
VOCABULARY = 40
LIGER = (WORDS, HIDDEN, VOCABULARY)


def leaf(*shape: int) -> Tensor:
    """Return a random tensor that requires a gradient."""
    return torch.randn(*shape, requires_grad=True)


def answer(profile: Profile) -> dict[str, Any]:
    """Return the figures of a profile.

    They are the MACs by phase (`macs`), the other FLOPs of operators of the package by operator and
    phase (`others`), and the names of unsupported operators (`unsupported`).
    """
    others = {}
    for cell in profile.op_counts:
        other_flops = cell.flops - 2 * cell.macs
        is_of_package = re.search(r"::|\.", cell.operator)
        if is_of_package and other_flops > 0:
            others[f"{cell.operator} {cell.phase}"] = other_flops
    return {
        "macs": macs(profile),
        "others": others,
        "unsupported": sorted(each.operator for each in profile.unsupported),
    }


def trained(model: nn.Module | Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Count forward and backward of a model or a function."""
    module = model if isinstance(model, nn.Module) else Function(model)
    return answer(lflops.count(module, args, backward=True))


def step(optimizer: Callable[[Any], torch.optim.Optimizer]) -> dict[str, Any]:
    """Count a step of an optimizer for a linear layer."""
    model = nn.Linear(IN, OUT)
    model(torch.randn(TOKENS, IN)).sum().backward()
    made = optimizer(model.parameters())
    with lflops.counting(model) as counted:
        made.step()
    return answer(counted.profile)


def bitsandbytes() -> dict[str, Any]:
    """Count linear layers with 4 and 8 bits, and optimizers."""
    package = importlib.import_module("bitsandbytes")
    layers = package.nn
    optimizers = package.optim
    four = layers.Linear4bit(IN, OUT, quant_type="nf4", compute_dtype=torch.float32).to("cpu")
    eight = layers.Linear8bitLt(IN, OUT, has_fp16_weights=False).to("cpu")
    eight_trained = layers.Linear8bitLt(IN, OUT, has_fp16_weights=True).to("cpu")
    return {
        "4 bits": trained(four, leaf(TOKENS, IN)),
        "8 bits": trained(eight, leaf(TOKENS, IN)),
        "8 bits, trained": trained(eight_trained, leaf(TOKENS, IN)),
        "AdamW": step(lambda parameters: optimizers.AdamW(parameters, optim_bits=32)),
        "Adam of 8 bits": step(
            lambda parameters: optimizers.Adam8bit(parameters, min_8bit_size=1, weight_decay=0.1)
        ),
        "Lion": step(lambda parameters: optimizers.Lion(parameters, weight_decay=0)),
        "SGD": step(lambda parameters: optimizers.SGD(parameters, lr=0.1, momentum=0.9)),
    }


class Adapters(nn.Module):
    """Blocks of a linear layer in 4 bits with an adapter, and a ReLU.

    The layers are those of `package`. If it is `None`, they are the layers that an estimate uses.
    """

    def __init__(self, package: Any, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(ADAPTED, ADAPTED, bias=False), nn.ReLU()) for _ in range(4)
        )
        if package is None:
            add_adapters("", self, 4, kind)
            return
        add_adapters("", self, 4, None)
        for block in self.blocks:
            layer = package.nn.Linear4bit(
                ADAPTED,
                ADAPTED,
                bias=False,
                compute_dtype=torch.float32,
                quant_type="nf4",
                compress_statistics=kind == "nf4-dq",
            )
            block.get_submodule("0").base = layer.requires_grad_(requires_grad=False).to("cpu")

    def forward(self, x: Tensor) -> Tensor:
        """Run all blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def adapters_over_four_bits() -> dict[str, Any]:
    """Return the real and the estimated peak of training with adapters, in bytes.

    The CPU allocator of torch measures the real peak.
    """
    package = importlib.import_module("bitsandbytes")

    def begin(kind: str) -> Callable[[], object]:
        model = Adapters(package, kind)
        optimizer = torch.optim.SGD(
            [each for each in model.parameters() if each.requires_grad], foreach=False
        )
        x = torch.randn(8, ADAPTED)

        def step() -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    found = {}
    for kind in ("nf4", "nf4-dq"):
        how: dict[str, Any] = {"backward": True, "loss": Tensor.sum, "optimizer": "sgd"}
        memory = lflops.estimate(
            partial(Adapters, None, kind), torch.zeros(8, ADAPTED), **how
        ).memory
        with tempfile.TemporaryDirectory() as folder:
            found[kind] = [
                max(allocated(partial(begin, kind), Path(folder))),
                memory.peak_bytes if memory is not None else None,
            ]
    return found


def torchao() -> dict[str, Any]:
    """Count linear layers that are quantized after training, during it, or from the beginning."""
    quantization = importlib.import_module("torchao.quantization")
    aware = importlib.import_module("torchao.quantization.qat")
    training = importlib.import_module("torchao.prototype.quantized_training")
    float8 = importlib.import_module("torchao.float8")
    optimizers = importlib.import_module("torchao.optim")

    def quantized(config: Any) -> nn.Module:
        model = nn.Sequential(nn.Linear(INNER, OUTER))
        quantization.quantize_(model, config)
        return model

    ways = {
        "8 bits": quantized(quantization.Int8WeightOnlyConfig()),
        "aware of quantization": quantized(
            aware.QATConfig(quantization.Int8DynamicActivationIntxWeightConfig(), step="prepare")
        ),
        "8 bits, trained": quantized(training.int8_weight_only_quantized_training()),
        "floats of 8 bits": float8.convert_to_float8_training(
            nn.Sequential(nn.Linear(INNER, OUTER))
        ),
    }
    found = {name: trained(model, leaf(ROWS, INNER)) for name, model in ways.items()}
    both = quantized(quantization.Int8DynamicActivationInt8WeightConfig())
    found["8 bits on both sides"] = answer(lflops.count(both, (torch.randn(ROWS, INNER),)))
    found["AdamW of 8 bits"] = step(optimizers.AdamW8bit)
    return found


def fbgemm() -> dict[str, Any]:
    """Count matmuls with jagged tensors, and embedding bags."""
    importlib.import_module("fbgemm_gpu")
    training = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    operators = torch.ops.fbgemm
    tokens = sum(LENGTHS)
    longest = max(LENGTHS)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    bags = torch.tensor([0, *BAGS]).cumsum(0)
    words = torch.randint(0, 20, (sum(BAGS),))
    host = (20, WIDTH, common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
    return {
        "jagged by dense": trained(
            lambda x, y: operators.jagged_dense_bmm(x, offsets, y, longest)[0],
            leaf(tokens, K),
            leaf(len(LENGTHS), K, M),
        ),
        "jagged by dense, cut": trained(
            lambda x, y: operators.jagged_dense_bmm(x, offsets, y, longest - 1)[0],
            leaf(tokens, K),
            leaf(len(LENGTHS), K, M),
        ),
        "jagged by jagged": trained(
            lambda x, y: operators.jagged_jagged_bmm(x, y, offsets, longest),
            leaf(tokens, K),
            leaf(tokens, M),
        ),
        "vectors by jagged": trained(
            lambda v, a: operators.batched_dense_vec_jagged_2d_mul(v, a, offsets),
            leaf(2 * len(LENGTHS), longest),
            leaf(tokens, 2 * K),
        ),
        "softmax": trained(
            lambda x: operators.jagged_softmax(x, offsets, longest)[0], leaf(tokens, K)
        ),
        "times dense": trained(
            lambda x, y: operators.jagged_dense_elementwise_mul(x, [offsets], y)[0],
            leaf(tokens, K),
            leaf(len(LENGTHS), longest, K),
        ),
        "dense bags": trained(
            training.DenseTableBatchedEmbeddingBagsCodegen([(20, WIDTH)] * 2, use_cpu=True),
            words,
            bags,
        ),
        "split bags": trained(
            training.SplitTableBatchedEmbeddingBagsCodegen([host] * 2), words, bags
        ),
    }


def liger() -> dict[str, Any]:
    """Count losses and rotary embeddings, whose Triton kernels are interpreted on the CPU."""
    os.environ["TRITON_INTERPRET"] = "1"
    package = importlib.import_module("liger_kernel.transformers")
    rope = importlib.import_module("liger_kernel.transformers.rope").liger_rotary_pos_emb
    targets = torch.randint(0, VOCABULARY, (WORDS,))
    cos = torch.randn(1, WORDS, 8)
    sin = torch.randn(1, WORDS, 8)
    return {
        "cross entropy": trained(
            lambda x: package.LigerCrossEntropyLoss()(2 * x, targets), leaf(WORDS, VOCABULARY)
        ),
        "head": trained(
            lambda x, weight: package.LigerFusedLinearCrossEntropyLoss()(weight, x, targets),
            leaf(WORDS, HIDDEN),
            leaf(VOCABULARY, HIDDEN),
        ),
        "rotary": trained(
            lambda q, k: rope(q, k, cos, sin)[0], leaf(1, 2, WORDS, 8), leaf(1, 3, WORDS, 8)
        ),
    }


def unnamed(schema: Any) -> str:
    """Return a schema as text, without the alias names of the arguments that it writes to."""
    return re.sub(r"\(\w+!\)", "(!)", str(schema))


def schemas(*modules: str) -> dict[str, Any]:
    """Compare the schemas of stand-ins with those of the real operators.

    Args:
        *modules: Modules of the packages, which are imported first.

    Returns:
        `there` is the number of operators that exist. `others` has the schemas that differ: the
        schema of the stand-in, and the real one.
    """
    from tests.support.package_stand_ins import ALL

    for module in modules:
        importlib.import_module(module)
    count = 0
    others = {}
    for text in ALL:
        schema = torch._C.parse_schema(text)
        namespace, _, name = schema.name.partition("::")
        real = getattr(getattr(torch.ops, namespace), name, None)
        if real is None:
            continue
        count += 1
        mine = unnamed(schema)
        its = unnamed(real.default._schema)
        if mine != its:
            others[mine] = its
    return {"there": count, "others": others}
