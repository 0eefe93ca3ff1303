"""Kernels of other packages in a count.

Operators under the packages' schemas, functions that no dispatcher sees, launches of Triton.
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
    """A tensor of that shape, or with those numbers."""
    if isinstance(value, Values):
        return torch.tensor(value, dtype=torch.int32)
    return torch.zeros(value) if isinstance(value, tuple) else value


def argument(known: Any, place: int, case: Case) -> Any:
    """What a case says of an argument, as the operator takes it.

    Its default or something of its type where the case says nothing.
    """
    kind = str(known.type)
    given = case.args[place] if place < len(case.args) else case.kwargs.get(known.name, FILLERS)
    if given is FILLERS and known.has_default_value():
        return known.default_value
    if given is FILLERS:
        return (
            None
            if kind.startswith("Optional")
            else torch.zeros(1)
            if kind == "Tensor"
            else FILLERS[kind]
        )
    return (
        tensor(given)
        if "Tensor" in kind and "List" not in kind
        else list(given)
        if kind == "List[int]"
        else given
    )


def costs(profile: Profile, name: str) -> Cost:
    """What was counted of an operator."""
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
    """Called with tensors as the package calls it.

    What it asks for by name, it finds; what lengths it needs, it reads.
    """
    monkeypatch.setattr(package_stand_ins, "result_shape", case.kwargs.get("out", (1,)))
    function = operator(case.operators)
    arguments = function._schema.arguments
    args = [argument(each, place, case) for place, each in enumerate(arguments)]
    meta = case.expected.is_upper_bound and "D_offsets" not in case.kwargs
    names = ("cu_seqlens_q", "cu_seqlens_k", "x_offsets")
    args = [
        each.to("meta") if meta and known.name in names else each
        for each, known in zip(args, arguments, strict=True)
    ]
    profile = lflops.count(Function(lambda: function(*args)), ())
    expected = case.expected
    again = expected.recompute
    whole = (
        None
        if again is None
        else again._replace(
            executed_macs=again.macs if again.executed_macs is None else again.executed_macs
        )
    )
    executed = expected.macs if expected.executed_macs is None else expected.executed_macs
    assert expected._replace(
        executed_macs=executed, recompute=whole, is_upper_bound=False
    ) == costs(profile, case.operators)
    assert () == profile.unsupported
    assert (["upper_bound"] if expected.is_upper_bound else []) == [
        note.code for note in profile.notes
    ]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Makes a module with functions, as a package that is installed and loaded."""

    def make(name: str, **functions: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


def returns(shape: tuple[int, ...]) -> Callable[..., Tensor]:
    """A function that shows the dispatcher nothing but an allocation."""
    return lambda *_, **__: torch.empty(shape)


def of(profile: Profile) -> dict[str, tuple[int, int, int]]:
    """MACs, executed MACs and other FLOPs by operator and phase, of those of packages."""
    return {
        f"{cell.operator} {cell.phase}": (cell.macs, cell.executed_macs, cell.flops - 2 * cell.macs)
        for cell in profile.op_counts
        if "." in cell.operator
    }


class Scan(torch.autograd.Function):
    """A selective scan as mamba-ssm calls it."""

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
    """2 * 5 * 7 inputs of 3 states.

    8 operations each and a softplus; backward twice that, and the states once more.
    """
    kernels = package("selective_scan_cuda", fwd=returns((2, 5, 7)), bwd=returns((2, 5, 7)))
    before = dict(vars(kernels))

    class Layer(nn.Module):
        def forward(self, u: Tensor) -> Tensor:
            return Scan.apply(u, torch.zeros(5, 3), kernels)  # type: ignore[no-any-return,no-untyped-call]

    profile = lflops.count(
        nn.Sequential(Layer()), torch.randn(2, 5, 7, requires_grad=True), backward=True
    )
    inputs, scan = 2 * 5 * 7, 2 * 5 * 7 * 3
    assert {
        "selective_scan_cuda.fwd forward": (0, 0, 8 * scan + inputs),
        "selective_scan_cuda.bwd backward": (0, 0, 2 * 8 * scan),
        "selective_scan_cuda.bwd recompute": (0, 0, 6 * scan),
    } == of(profile)
    assert {"0"} == {cell.module for cell in profile.op_counts if "scan" in cell.operator}
    assert before == vars(kernels)


def test_a_function_within_an_operator_with_a_formula_is_not_counted_twice(
    package: Callable[..., ModuleType],
) -> None:
    """The operator's own formula has it."""
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
    """After success, an exception, a second count within the first, and where somebody replaces one meanwhile."""
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
    """A tensor of eight bits as Transformer Engine has it: no tensor of torch's."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.dtype = shape, torch.uint8

    def size(self) -> tuple[int, ...]:
        """Its shape."""
        return self.shape


TOKENS, IN, OUT = 6, 8, 5
nothing = (None, None, None)
"""Neither a result to write to, nor a quantizer, nor a dtype."""
A_CALL: dict[str, tuple[tuple[Any, ...], int]] = {
    # Forward, the input's gradient, the weight's: cuBLAS reads all by columns. What is more than
    # the product comes last.
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
    """6 tokens, 8 inputs, 5 outputs; a bias and a GELU are an operation an element each."""
    args, more = A_CALL[call]
    engine = package("transformer_engine_torch", generic_gemm=returns((1,)))
    profile = lflops.count(Function(lambda: engine.generic_gemm(*args)), ())
    assert {
        "transformer_engine_torch.generic_gemm forward": (
            TOKENS * IN * OUT,
            TOKENS * IN * OUT,
            more,
        )
    } == of(profile)


class Mask:
    """An enumeration's member, as pybind shows it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"NVTE_Mask_Type.{self.name}"


@pytest.mark.parametrize("way", ["fwd", "bwd"])
def test_transformer_engines_attention_is_counted_by_its_lengths(
    way: str, package: Callable[..., ModuleType]
) -> None:
    """3 and 5 tokens, 2 heads of 4, causal: 1 + 2 + 3 and 1 + ... + 5 scores are executed."""
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
    assert (scores * products, seen * products) == of(profile)[
        f"transformer_engine_torch.fused_attn_{way} forward"
    ][:2]


def test_a_chunked_scan_is_the_sum_of_its_products(package: Callable[..., ModuleType]) -> None:
    """2 batches of 8 steps in chunks of 4, 3 heads of 5, 2 groups of 6 states.

    In backward what forward had is recompute.
    """
    b, length, chunk, heads, width, groups, states = 2, 8, 4, 3, 5, 2, 6
    scan = package(
        "mamba_ssm.ops.triton.ssd_combined",
        _bmm_chunk_fwd=returns((1,)),
        _chunk_state_fwd=returns((1,)),
        _chunk_scan_fwd=returns((1,)),
    )
    x, bc, dt = (
        torch.zeros(b, length, heads, width),
        torch.zeros(b, length, groups, states),
        torch.zeros(b, heads, length // chunk, chunk),
    )

    def forward() -> None:
        scan._bmm_chunk_fwd(bc, bc, chunk, seq_idx=None)
        scan._chunk_state_fwd(bc, x, dt, dt)
        scan._chunk_scan_fwd(None, x, dt, dt, bc, None)

    found = of(lflops.count(Function(forward), ()))
    pairs, through_states = b * heads * length * chunk * width, b * length * heads * width * states
    assert [b * groups * length * chunk * states, through_states, pairs + through_states] == [
        each[0] for each in found.values()
    ]
    # Of 4 steps a chunk each needs those before it: 1 + 2 + 3 + 4 of 16 pairs.
    assert pairs * 10 // 16 + through_states == list(found.values())[-1][1]


def test_ligers_products_are_torchs_and_its_kernel_has_a_formula(
    package: Callable[..., ModuleType],
) -> None:
    """The head's product runs as an operator; the loss and its gradient are 9 operations a logit."""
    head = package(
        "liger_kernel.ops.fused_linear_cross_entropy",
        fused_linear_cross_entropy_forward=lambda x, weight, target: x @ weight.t(),
    )
    profile = lflops.count(
        Function(lambda x, w: head.fused_linear_cross_entropy_forward(x, w, target=None)),
        (torch.randn(TOKENS, IN), torch.randn(OUT, IN)),
    )
    assert {"forward": TOKENS * IN * OUT} == macs(profile)
    assert (0, 0, 9 * TOKENS * OUT) == of(profile)[
        "liger_kernel.ops.fused_linear_cross_entropy.fused_linear_cross_entropy_forward forward"
    ]


def test_a_cache_of_keys_is_counted_as_far_as_it_is_filled(
    package: Callable[..., ModuleType],
) -> None:
    """One new query and key for each of two sequences, which hold 3 and 5.

    They see 4 and 6 of the 16 places.
    """
    flash = package("flash_attn_2_cuda", fwd_kvcache=returns((1,)))
    q, cache, new, held = (
        torch.zeros(2, 1, 4, 8),
        torch.zeros(2, 16, 4, 8),
        torch.zeros(2, 1, 4, 8),
        torch.tensor([3, 5], dtype=torch.int32),
    )
    args = (q, cache, cache, new, new, held, *[None] * 8, True, -1, -1)
    profile = lflops.count(Function(lambda: flash.fwd_kvcache(*args)), ())
    assert (4 * (4 + 6) * 16, 4 * (4 + 6) * 16) == of(profile)[
        "flash_attn_2_cuda.fwd_kvcache forward"
    ][:2]


class Applier:
    """What apex and DeepSpeed call their kernels by."""

    def __call__(self, kernel: Any, flag: Any, tensors: Any, *args: Any) -> None:
        kernel(2048, flag, tensors, *args)


def multi_tensor_adam(*_: Any) -> None:
    """A kernel that shows nothing."""


def multi_tensor_unheard_of(*_: Any) -> None:
    """One without a formula."""


class Fused(torch.optim.Optimizer):
    """An optimizer on lists, as apex has it."""

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
    """A step of two linear layers."""
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
    """Adam with a decay: 11 operations an element."""
    profile = step_of(multi_tensor_adam, package)
    name = "apex.multi_tensor_apply.multi_tensor_apply.MultiTensorApply.__call__"
    found: dict[str, int] = {}
    for cell in profile.op_counts:
        if cell.operator == name and cell.phase == "optimizer":
            found[cell.module] = found.get(cell.module, 0) + cell.flops
    assert {"0": 11 * (3 * 4 + 4), "1": 11 * 4 * 2} == found


@pytest.mark.filterwarnings("ignore:count. the formula failed")
def test_a_fused_optimizer_without_a_formula_is_in_the_ledger(
    package: Callable[..., ModuleType],
) -> None:
    """By the name of what called its kernel."""
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
    """A newer Triton, and the hooks that it has."""
    chain = Chain()
    return {
        "knobs": SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=chain))
    }, lambda: chain.calls


def single() -> tuple[Any, Callable[[], list[Any]]]:
    """An older one, with room for one."""
    kernel = SimpleNamespace(launch_enter_hook=None)
    return {"compiler": SimpleNamespace(CompiledKernel=kernel)}, lambda: [
        each for each in [kernel.launch_enter_hook] if each is not None
    ]


@pytest.mark.parametrize("release", [chained, single])
def test_a_launch_of_triton_without_a_formula_is_in_the_ledger(
    release: Any, package: Callable[..., ModuleType]
) -> None:
    """By the kernel's name; one within a function that has a formula is that function's.

    Afterwards Triton has no hook.
    """
    contents, hooks = release()
    package("triton", **contents)

    def launched(*_: Any) -> Tensor:
        for hook in hooks():
            hook(SimpleNamespace(get=lambda: {"name": "fused_thing"}))
        return torch.empty(1)

    covered = package("selective_scan_cuda", fwd=launched)
    profile = lflops.count(
        Function(
            lambda: (
                launched(),
                covered.fwd(torch.zeros(2, 3, 4), None, torch.zeros(3, 2), *[None] * 6),
            )[0]
        ),
        (),
    )
    assert [("triton::fused_thing", 1)] == [
        (each.operator, each.calls) for each in profile.unsupported
    ]
    assert [] == hooks()


def test_every_function_names_a_module_and_what_is_in_it() -> None:
    """As the hook takes it."""
    assert all(
        name.count(":") == 1
        and all(part.isidentifier() for part in name.replace(":", ".").split("."))
        for name in FUNCTIONS
    )
