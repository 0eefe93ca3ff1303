"""Test counts of kernels of installed packages against costs worked out by hand.

`make packages` installs the packages that run on a CPU.
"""

import importlib.util
import json
from typing import Any

import pytest

from tests.support import real_packages
from tests.support.warm_python import WarmPython


def found(warm_python: WarmPython, package: str, call: str) -> dict[str, Any]:
    """Return the result of a function of `real_packages`, called in a new process."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; make packages installs it")
    code = f"import json; from tests.support import real_packages; print(json.dumps(real_packages.{call}))"
    ended = warm_python.run(code)
    assert not ended.status, ended.err[-2000:]
    result: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    return result


def figures(kind: str, results: dict[str, Any]) -> dict[str, Any]:
    """Return one of the numbers of each result, without results that have none."""
    return {name: each[kind] for name, each in results.items() if each[kind]}


def test_bitsandbytes_layers_and_optimizers(warm_python: WarmPython) -> None:
    """Frozen quantized weights need only the gradient of the input, and trained weights need both.

    Updates cost what the convention for optimizers says.
    """
    results = found(warm_python, "bitsandbytes", "bitsandbytes()")
    tokens, inner, outer = real_packages.BITSANDBYTES
    once = tokens * inner * outer
    elements = outer * inner + outer
    assert {
        "4 bits": {"forward": once, "backward": once},
        "8 bits": {"forward": once, "backward": once},
        "8 bits, trained": {"forward": once, "backward": 2 * once},
    } == figures("macs", results)
    updates = {
        name: sum(results[name]["others"].values())
        for name in ("AdamW", "Adam of 8 bits", "Lion", "SGD")
    }
    # Adam costs 10 FLOPs, and its decay 1. Each of two states in 8 bits costs 1 more to unpack and
    # 2 more to pack.
    assert {
        "AdamW": 11 * elements,
        "Adam of 8 bits": 17 * elements,
        "Lion": 7 * elements,
        "SGD": 3 * elements,
    } == updates
    assert {} == figures("unsupported", results)


def test_a_training_over_weights_of_four_bits_holds_what_is_estimated(
    warm_python: WarmPython,
) -> None:
    """The estimate for four layers of bitsandbytes is at most 4 KiB below the measured memory.

    The peak includes an unpacked weight of 1 MiB.
    """
    for held, estimated in found(warm_python, "bitsandbytes", "adapters_over_four_bits()").values():
        assert 0 <= held - estimated < 4 * 1024
        assert estimated > 4 * real_packages.ADAPTED**2


def test_torchao_layers_however_they_are_quantized(warm_python: WarmPython) -> None:
    """Quantized layers of torchao call matmuls of ATen.

    Weights that are quantized after training need no gradient.
    """
    results = found(warm_python, "torchao", "torchao()")
    rows, inner, outer = real_packages.TORCHAO
    once = rows * inner * outer
    assert {
        "8 bits": {"forward": once, "backward": once},
        "aware of quantization": {"forward": once, "backward": 2 * once},
        "8 bits, trained": {"forward": once, "backward": 2 * once},
        "floats of 8 bits": {"forward": once, "backward": 2 * once},
        "8 bits on both sides": {"forward": once},
    } == figures("macs", results)
    assert {} == figures("unsupported", results)


def test_fbgemm_jagged_tensors_and_embedding_bags(warm_python: WarmPython) -> None:
    """Jagged tensors are counted by their real lengths, and bags by their number of words.

    The sequences have 3, 5 and 2 rows, which are 9 if they are cut at 4. A bag adds up the rows of
    its words.
    """
    results = found(warm_python, "fbgemm_gpu", "fbgemm()")
    lengths, k, m, bags, width = real_packages.FBGEMM
    tokens = sum(lengths)
    cut = sum(min(each, max(lengths) - 1) for each in lengths)
    words = sum(bags)
    assert {
        "jagged by dense": {"forward": tokens * k * m, "backward": 2 * tokens * k * m},
        "jagged by dense, cut": {"forward": cut * k * m, "backward": 2 * cut * k * m},
        "jagged by jagged": {"forward": tokens * k * m, "backward": 2 * tokens * k * m},
        "vectors by jagged": {"forward": tokens * 2 * k, "backward": 2 * tokens * 2 * k},
    } == figures("macs", results)
    elements = tokens * k
    added = words * width
    assert {
        "softmax": {
            "fbgemm::jagged_softmax_forward forward": 5 * elements,
            "fbgemm::jagged_softmax_backward backward": 4 * elements,
        },
        "times dense": {
            "fbgemm::jagged_dense_elementwise_mul_forward forward": elements,
            "fbgemm::jagged_dense_elementwise_mul_backward backward": 2 * elements,
        },
        "dense bags": {"fbgemm::dense_embedding_codegen_lookup_function forward": added},
        "split bags": {
            "fbgemm::split_embedding_codegen_forward_unweighted_pt2_wrapper forward": added
        },
    } == figures("others", results)
    # The backward operator also runs the optimizer step, and there are many optimizers.
    update = "fbgemm::split_embedding_backward_codegen_sgd_unweighted_pt2_wrapper"
    assert {"split bags": [update]} == figures("unsupported", results)


def test_liger_losses_under_tritons_interpreter(warm_python: WarmPython) -> None:
    """Liger's fused head runs its three matmuls in forward, together with the gradients.

    Cross entropy costs 9 FLOPs per logit, and a rotary embedding 3 per element.
    """
    pytest.importorskip("triton", exc_type=ImportError)
    results = found(warm_python, "liger_kernel", "liger()")
    words, hidden, vocabulary = real_packages.LIGER
    assert {"head": {"forward": 3 * words * hidden * vocabulary}} == figures("macs", results)
    ops = "liger_kernel.ops"
    others = figures("others", results)
    assert (
        9 * words * vocabulary
        == others["cross entropy"][f"{ops}.cross_entropy.cross_entropy_forward forward"]
    )
    assert (
        9 * words * vocabulary
        == others["head"][
            f"{ops}.fused_linear_cross_entropy.fused_linear_cross_entropy_forward forward"
        ]
    )
    rotated = (2 + 3) * words * 8
    assert {
        f"{ops}.rope.rope_{way}": 3 * rotated for way in ("forward forward", "backward backward")
    } == others["rotary"]
    assert {} == figures("unsupported", results)


@pytest.mark.parametrize(
    ("package", "modules", "there"),
    [
        ("bitsandbytes", ["bitsandbytes"], 15),
        ("torchao", ["torchao"], 9),
        (
            "fbgemm_gpu",
            ["fbgemm_gpu", "fbgemm_gpu.split_table_batched_embeddings_ops_training"],
            27,
        ),
    ],
)
def test_stand_ins_have_the_schemas_of_the_packages(
    package: str, modules: list[str], there: int, warm_python: WarmPython
) -> None:
    """The stand-ins have the schemas of those operators that the installed release contains."""
    results = found(warm_python, package, f"schemas(*{modules})")
    assert there == results["there"]
    assert {} == results["others"]
