"""Test counts of kernels of other packages, with stand-ins for the packages.

There are operators with the packages' schemas, functions that bypass the dispatcher, and launches
of Triton kernels.
"""

import contextlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lflops
from lflops.formulas.table import FUNCTIONS, Cost, Values
from lflops.profile.profile import Profile
from tests.support import package_stand_ins
from tests.support.count_function import Function, macs
from tests.support.formula_cases import Case
from tests.support.package_cases import CASES
from tests.support.package_stand_ins import operator

FILLERS: dict[str, Any] = {
    "int": 0,
    "float": 0.0,
    "bool": False,
    "str": "nf4",
    "List[Tensor]": [],
    "List[int]": [],
}
ALONE = [
    Case(name, each.args, each.kwargs, each.expected)
    for each in CASES
    for name in each.operators.split()
]


def tensor(value: Any) -> Any:
    """Return a tensor with the given shape or the given values; other values are unchanged."""
    if isinstance(value, Values):
        return torch.tensor(value, dtype=torch.int32)
    return torch.zeros(value) if isinstance(value, tuple) else value


def argument(known: Any, place: int, case: Case) -> Any:
    """Return an argument of the operator, from the case if it has it.

    Otherwise return the argument's default, or a value of its type.
    """
    kind = str(known.type)
    if place < len(case.args):
        given = case.args[place]
    elif known.name in case.kwargs:
        given = case.kwargs[known.name]
    elif known.has_default_value():
        return known.default_value
    else:
        return filler(kind)
    if "Tensor" in kind and "List" not in kind:
        return tensor(given)
    if kind == "List[int]":
        return list(given)
    return given


def filler(kind: str) -> Any:
    """Return a value of a type for an argument that does not matter."""
    if kind.startswith("Optional"):
        return None
    if kind == "Tensor":
        return torch.zeros(1)
    return FILLERS[kind]


def costs(profile: Profile, name: str) -> Cost:
    """Return the counted cost of an operator."""
    sums = {phase: [0, 0, 0] for phase in ("forward", "recompute")}
    for cell in profile.op_counts:
        if cell.operator == name:
            sums[cell.phase] = [cell.macs, cell.executed_macs, cell.flops - 2 * cell.macs]
    again = sums["recompute"]
    return Cost(*sums["forward"], recompute=Cost(*again) if any(again) else None)


@pytest.mark.parametrize(
    "case", ALONE, ids=[f"{case.operators}-{place}" for place, case in enumerate(ALONE)]
)
def test_an_operator_is_counted_under_its_packages_schema(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator that is called with tensors, as its package calls it, has the expected cost.

    The formula must find the arguments that it needs by name, and read the lengths that it needs.
    """
    monkeypatch.setattr(package_stand_ins, "result_shape", case.kwargs.get("out", (1,)))
    function = operator(case.operators)
    # An upper bound is expected if the lengths have no values, that is, on the meta device.
    without_values = case.expected.is_upper_bound and "D_offsets" not in case.kwargs
    lengths = ("cu_seqlens_q", "cu_seqlens_k", "x_offsets")
    args = []
    for place, known in enumerate(function._schema.arguments):
        value = argument(known, place, case)
        if without_values and known.name in lengths:
            value = value.to("meta")
        args.append(value)
    profile = lflops.count(Function(lambda: function(*args)), ())
    expected = case.expected
    again = expected.recompute
    if again is not None and again.executed_macs is None:
        again = again._replace(executed_macs=again.macs)
    executed = expected.macs if expected.executed_macs is None else expected.executed_macs
    whole = expected._replace(executed_macs=executed, recompute=again, is_upper_bound=False)
    assert whole == costs(profile, case.operators)
    assert () == profile.unsupported
    codes = [note.code for note in profile.notes]
    assert codes == (["upper_bound"] if expected.is_upper_bound else [])


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Return a function that creates a module with functions, like an installed package."""

    def make(name: str, **functions: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


def returns(shape: tuple[int, ...]) -> Callable[..., Tensor]:
    """Return a function that only allocates a tensor, so the dispatcher sees no work."""
    return lambda *_, **__: torch.empty(shape)


def package_work(profile: Profile) -> dict[str, tuple[int, int, int]]:
    """Return MACs, executed MACs and other FLOPs of package functions, by operator and phase."""
    found = {}
    for op_count in profile.op_counts:
        # Only the names of package functions contain a dot.
        if "." in op_count.operator:
            other_flops = op_count.flops - 2 * op_count.macs
            key = f"{op_count.operator} {op_count.phase}"
            found[key] = (op_count.macs, op_count.executed_macs, other_flops)
    return found


class Scan(torch.autograd.Function):
    """A selective scan, called as mamba-ssm calls it."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, a: Tensor, kernels: ModuleType) -> Tensor:
        ctx.kernels, ctx.a = kernels, a
        ctx.save_for_backward(u)
        out: Tensor = kernels.fwd(u, u, a, None, None, None, None, None, True)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (u,) = ctx.saved_tensors
        return ctx.kernels.bwd(u, u, ctx.a, None, None, None, None, None, grad), None, None


def test_a_function_in_c_is_counted_forward_and_backward_in_its_module(
    package: Callable[..., ModuleType],
) -> None:
    """A C function is counted in forward and backward, for the module that calls it.

    It has 2 * 5 * 7 inputs of 3 states. Each state costs 8 FLOPs, and each input a softplus.
    Backward costs twice as much, and recomputes the states.
    """
    kernels = package("selective_scan_cuda", fwd=returns((2, 5, 7)), bwd=returns((2, 5, 7)))
    before = dict(vars(kernels))

    class Layer(nn.Module):
        def forward(self, u: Tensor) -> Tensor:
            return Scan.apply(u, torch.zeros(5, 3), kernels)  # type: ignore[no-any-return,no-untyped-call]

    profile = lflops.count(
        nn.Sequential(Layer()), torch.randn(2, 5, 7, requires_grad=True), backward=True
    )
    inputs = 2 * 5 * 7
    scan = inputs * 3
    assert {
        "selective_scan_cuda.fwd forward": (0, 0, 8 * scan + inputs),
        "selective_scan_cuda.bwd backward": (0, 0, 2 * 8 * scan),
        "selective_scan_cuda.bwd recompute": (0, 0, 6 * scan),
    } == package_work(profile)
    assert {"0"} == {cell.module for cell in profile.op_counts if "scan" in cell.operator}
    assert before == vars(kernels)


def test_a_function_within_an_operator_with_a_formula_is_not_counted_twice(
    package: Callable[..., ModuleType],
) -> None:
    """If an operator has a formula, a package function that it calls is not counted in addition."""
    kernels = package("causal_conv1d_cuda", causal_conv1d_fwd=returns((2, 5, 7)))
    library = torch.library.Library("lflops_outer", "DEF")
    library.define("conv(Tensor x, Tensor weight) -> Tensor")
    library.impl(
        "conv",
        lambda x, w: kernels.causal_conv1d_fwd(x, w, None, None, None, None, None, False),
        "CPU",
    )
    x, weight = torch.randn(2, 5, 7), torch.randn(5, 4)
    conv = torch.ops.lflops_outer.conv
    assert {"forward": 2 * 5 * 7 * 4} == macs(lflops.count(Function(conv), (x, weight)))
    lflops.register_formula(conv, lambda x, weight, *, out: 42)
    try:
        assert {"forward": 42} == macs(lflops.count(Function(conv), (x, weight)))
    finally:
        from lflops.flop_counter import operator_costs as table

        table._USERS.pop("lflops_outer::conv")
        library._destroy()


def test_the_functions_are_as_they_were_after_every_end(package: Callable[..., ModuleType]) -> None:
    """The package's functions are restored after success, after an error and after a nested count.

    A function that the user replaces during the count stays replaced.
    """
    kernels = package("selective_scan_cuda", fwd=returns((1,)), bwd=returns((1,)))
    model, before = nn.Linear(2, 2), dict(vars(kernels))
    with contextlib.suppress(KeyError), lflops.counting(model):
        assert kernels.fwd is not before["fwd"]
        raise KeyError
    assert before == vars(kernels)
    with lflops.counting(model):
        with lflops.counting(model):
            pass
        assert kernels.fwd is not before["fwd"]
    assert before == vars(kernels)
    with lflops.counting(model):
        kernels.fwd = mine = returns((2,))
    assert mine is kernels.fwd


class Quantized:
    """An 8-bit tensor of Transformer Engine, which is not a `torch.Tensor`."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.dtype = shape, torch.uint8

    def size(self) -> tuple[int, ...]:
        """Return the shape."""
        return self.shape


TOKENS, IN, OUT = 6, 8, 5
nothing = (None, None, None)
"""No tensor for the result, no quantizer and no dtype."""
A_CALL: dict[str, tuple[tuple[Any, ...], int]] = {
    # The calls of forward, of the input's gradient and of the weight's gradient, for cuBLAS, which
    # expects matrices in column order. The second value is the FLOPs in addition to the matmul.
    "forward": (
        (
            Quantized(OUT, IN),
            True,
            Quantized(TOKENS, IN),
            False,
            *nothing,
            torch.zeros(OUT),
            None,
            True,
        ),
        2 * TOKENS * OUT,
    ),
    "input": (
        (Quantized(OUT, IN), False, torch.zeros(TOKENS, OUT), False, *nothing, None, None, False),
        0,
    ),
    "weight": (
        (
            torch.zeros(TOKENS, IN),
            False,
            torch.zeros(TOKENS, OUT),
            True,
            *nothing,
            None,
            None,
            False,
        ),
        0,
    ),
}


@pytest.mark.parametrize("call", A_CALL)
def test_transformer_engines_products_are_counted_in_every_layout(
    call: str, package: Callable[..., ModuleType]
) -> None:
    """Matmuls of forward and of both gradients have the same MACs, although their layouts differ.

    There are 6 tokens, 8 inputs and 5 outputs. A bias and a GELU cost one FLOP per element each.
    """
    args, more = A_CALL[call]
    engine = package("transformer_engine_torch", generic_gemm=returns((1,)))
    profile = lflops.count(Function(lambda: engine.generic_gemm(*args)), ())
    assert {
        "transformer_engine_torch.generic_gemm forward": (
            TOKENS * IN * OUT,
            TOKENS * IN * OUT,
            more,
        )
    } == package_work(profile)


class Mask:
    """A member of a pybind enumeration."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"NVTE_Mask_Type.{self.name}"


@pytest.mark.parametrize("way", ["fwd", "bwd"])
def test_transformer_engines_attention_is_counted_by_its_lengths(
    way: str, package: Callable[..., ModuleType]
) -> None:
    """Attention is counted by the lengths of the packed sequences.

    Two heads attend to sequences of 3 and 5 tokens. With the causal mask 1 + 2 + 3 and 1 + ... + 5
    scores are executed.
    """
    engine = package("transformer_engine_torch", **{f"fused_attn_{way}": returns((1,))})
    offsets, x = torch.tensor([0, 3, 8], dtype=torch.int32), torch.zeros(8, 2, 4)
    before = (5, 5, True, 0.5, 0.0, False) if way == "fwd" else (5, 5, 0.5, 0.0, False)
    args = (
        *before,
        Mask("NVTE_THD_THD_THD"),
        Mask("NVTE_NO_BIAS"),
        Mask("NVTE_PADDING_CAUSAL_MASK"),
        [-1, 0],
        offsets,
        offsets,
        x,
        x,
        x,
        x,
    )
    profile = lflops.count(Function(lambda: getattr(engine, f"fused_attn_{way}")(*args)), ())
    scores, seen = 2 * (9 + 25), 2 * (6 + 15)
    products = 2 * 4 if way == "fwd" else 4 * 4
    assert (scores * products, seen * products) == package_work(profile)[
        f"transformer_engine_torch.fused_attn_{way} forward"
    ][:2]


def test_a_chunked_scan_is_the_sum_of_its_products(package: Callable[..., ModuleType]) -> None:
    """The cost of a chunked scan is the sum of its matmuls.

    There are 2 batches of 8 steps in chunks of 4, 3 heads of width 5, and 2 groups of 6 states.
    """
    b = 2
    length = 8
    chunk = 4
    heads = 3
    width = 5
    groups = 2
    states = 6
    scan = package(
        "mamba_ssm.ops.triton.ssd_combined",
        _bmm_chunk_fwd=returns((1,)),
        _chunk_state_fwd=returns((1,)),
        _chunk_scan_fwd=returns((1,)),
    )
    x = torch.zeros(b, length, heads, width)
    bc = torch.zeros(b, length, groups, states)
    dt = torch.zeros(b, heads, length // chunk, chunk)

    def forward() -> None:
        scan._bmm_chunk_fwd(bc, bc, chunk, seq_idx=None)
        scan._chunk_state_fwd(bc, x, dt, dt)
        scan._chunk_scan_fwd(None, x, dt, dt, bc, None)

    found = package_work(lflops.count(Function(forward), ()))
    pairs = b * heads * length * chunk * width
    through_states = b * length * heads * width * states
    assert [b * groups * length * chunk * states, through_states, pairs + through_states] == [
        each[0] for each in found.values()
    ]
    # In a chunk of 4 steps, each step needs itself and the steps before it: 1 + 2 + 3 + 4 of 16
    # pairs.
    assert pairs * 10 // 16 + through_states == list(found.values())[-1][1]


def test_ligers_products_are_torchs_and_its_kernel_has_a_formula(
    package: Callable[..., ModuleType],
) -> None:
    """The matmul of the head is counted as an operator, and Liger's kernel by its formula.

    The loss and its gradient cost 9 FLOPs per logit.
    """
    head = package(
        "liger_kernel.ops.fused_linear_cross_entropy",
        fused_linear_cross_entropy_forward=lambda x, weight, target: x @ weight.t(),
    )
    profile = lflops.count(
        Function(lambda x, w: head.fused_linear_cross_entropy_forward(x, w, target=None)),
        (torch.randn(TOKENS, IN), torch.randn(OUT, IN)),
    )
    assert {"forward": TOKENS * IN * OUT} == macs(profile)
    assert (0, 0, 9 * TOKENS * OUT) == package_work(profile)[
        "liger_kernel.ops.fused_linear_cross_entropy.fused_linear_cross_entropy_forward forward"
    ]


def test_a_cache_of_keys_is_counted_as_far_as_it_is_filled(
    package: Callable[..., ModuleType],
) -> None:
    """Attention with a key-value cache is counted by the number of cached keys.

    Two sequences hold 3 and 5 keys. With one new key each, their queries see 4 and 6 of 16 keys.
    """
    flash = package("flash_attn_2_cuda", fwd_kvcache=returns((1,)))
    q = torch.zeros(2, 1, 4, 8)
    cache = torch.zeros(2, 16, 4, 8)
    new = torch.zeros(2, 1, 4, 8)
    held = torch.tensor([3, 5], dtype=torch.int32)
    args = (q, cache, cache, new, new, held, *[None] * 8, True, -1, -1)
    profile = lflops.count(Function(lambda: flash.fwd_kvcache(*args)), ())
    assert (4 * (4 + 6) * 16, 4 * (4 + 6) * 16) == package_work(profile)[
        "flash_attn_2_cuda.fwd_kvcache forward"
    ][:2]


class Applier:
    """The class by which apex and DeepSpeed call their kernels."""

    def __call__(self, kernel: Any, flag: Any, tensors: Any, *args: Any) -> None:
        kernel(2048, flag, tensors, *args)


def multi_tensor_adam(*_: Any) -> None:
    """A kernel whose work the dispatcher does not see."""


def multi_tensor_unheard_of(*_: Any) -> None:
    """A kernel without a formula."""


class Fused(torch.optim.Optimizer):
    """An optimizer on lists of tensors, like those of apex."""

    def __init__(self, parameters: Any, applier: Any, kernel: Any) -> None:
        super().__init__(parameters, {})
        self.apply, self.kernel = applier, kernel

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        lists = [
            [each.grad for each in parameters],
            parameters,
            *[[torch.zeros_like(each) for each in parameters]] * 2,
        ]
        self.apply(self.kernel, torch.zeros(1), lists, 1e-3, 0.9, 0.999, 1e-8, 1, 1, 1, 0.1)


def step_of(kernel: Any, package: Callable[..., ModuleType]) -> Profile:
    """Count an optimizer step of two linear layers."""
    package("apex.multi_tensor_apply.multi_tensor_apply", MultiTensorApply=Applier)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    model(torch.randn(1, 3)).sum().backward()
    optimizer = Fused(model.parameters(), Applier(), kernel)
    with lflops.counting(model) as counted:
        optimizer.step()
    return counted.profile


def test_a_fused_optimizer_is_counted_by_the_module_that_owns_each_parameter(
    package: Callable[..., ModuleType],
) -> None:
    """The work of a fused optimizer belongs to the modules that own the parameters.

    Adam with weight decay costs 11 FLOPs per element.
    """
    profile = step_of(multi_tensor_adam, package)
    name = "apex.multi_tensor_apply.multi_tensor_apply.MultiTensorApply.__call__"
    found: dict[str, int] = {}
    for cell in profile.op_counts:
        if cell.operator == name and cell.phase == "optimizer":
            found[cell.module] = found.get(cell.module, 0) + cell.flops
    assert {"0": 11 * (3 * 4 + 4), "1": 11 * 4 * 2} == found


@pytest.mark.filterwarnings("ignore:count. these operators are not counted")
def test_a_fused_optimizer_without_a_formula_is_in_the_ledger(
    package: Callable[..., ModuleType],
) -> None:
    """A fused optimizer without a formula is unsupported, under the name of the applier."""
    profile = step_of(multi_tensor_unheard_of, package)
    assert {"apex.multi_tensor_apply.multi_tensor_apply.MultiTensorApply.__call__"} == {
        each.operator for each in profile.unsupported
    }
    assert ["formula_failed"] == [note.code for note in profile.notes]


class Chain:
    """Triton's list of hooks."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def add(self, hook: Any) -> None:
        self.calls.append(hook)

    def remove(self, hook: Any) -> None:
        self.calls.remove(hook)


def chained() -> tuple[Any, Callable[[], list[Any]]]:
    """Return the contents of a newer Triton, and a function that returns its hooks."""
    chain = Chain()
    knobs = SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=chain))
    return {"knobs": knobs}, lambda: chain.calls


def single() -> tuple[Any, Callable[[], list[Any]]]:
    """Return the contents of an older Triton, which has room for one hook, and its hooks."""
    kernel = SimpleNamespace(launch_enter_hook=None)

    def hooks() -> list[Any]:
        if kernel.launch_enter_hook is None:
            return []
        return [kernel.launch_enter_hook]

    return {"compiler": SimpleNamespace(CompiledKernel=kernel)}, hooks


@pytest.mark.parametrize("release", [chained, single])
def test_a_launch_of_triton_without_a_formula_is_in_the_ledger(
    release: Any, package: Callable[..., ModuleType]
) -> None:
    """A Triton kernel without a formula is unsupported, under the kernel's name.

    A launch inside a function with a formula belongs to that function. Afterwards Triton has no
    hook.
    """
    contents, hooks = release()
    package("triton", **contents)

    def launched(*_: Any) -> Tensor:
        for hook in hooks():
            hook(SimpleNamespace(get=lambda: {"name": "fused_thing"}))
        return torch.empty(1)

    covered = package("selective_scan_cuda", fwd=launched)

    def launch_both() -> Tensor:
        out = launched()
        covered.fwd(torch.zeros(2, 3, 4), None, torch.zeros(3, 2), *[None] * 6)
        return out

    profile = lflops.count(Function(launch_both), ())
    assert [("triton::fused_thing", 1)] == [
        (each.operator, each.calls) for each in profile.unsupported
    ]
    assert [] == hooks()


def test_every_function_names_a_module_and_what_is_in_it() -> None:
    """Every name has the form `module:attribute`, which the hook needs."""
    for name in FUNCTIONS:
        assert name.count(":") == 1
        assert all(part.isidentifier() for part in name.replace(":", ".").split("."))
