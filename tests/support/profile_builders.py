"""Handmade profiles for tests.

They are consistent, and small enough to check by hand.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from lflops.profile.module_names import ancestry
from lflops.profile.notes import Note
from lflops.profile.profile import (
    SCHEMA_VERSION,
    Allocation,
    Communication,
    DtypeShare,
    Memory,
    ModuleProfile,
    Moment,
    OpCount,
    Profile,
    Run,
    UnsupportedCall,
    Work,
)
from lflops.profile.records import (
    PHASES,
    ByCategory,
    Phase,
    Rank,
    RankActivity,
    RankComparison,
    RankDelay,
    RankStat,
    RankWait,
    TimingStats,
    Trace,
    TracedOperator,
)
from lflops.profile.steps import Step
from lflops.profile.timeline import ModuleSlice, StepTimeline, TimedWork

COUNTS = ("calls", "macs", "executed_macs", "flops", "bytes_moved", "comm_bytes")


def spread(median: float, n: int = 3) -> TimingStats:
    """A tenth below and a tenth above."""
    return TimingStats(median=median, low=0.9 * median, high=1.1 * median, n=n)


def work(**counts: Any) -> Work:
    """Any field of a `Work`; the counts that are not given are 0."""
    zeros = dict.fromkeys((*COUNTS, *(f"self_{count}" for count in COUNTS)), 0)
    return Work(**(zeros | counts))


def module_profile(**fields: Any) -> ModuleProfile:
    """Any field of a `ModuleProfile`; without any, a root that did nothing and has no parameter."""
    nothing: dict[str, Any] = {
        "class_name": "Module",
        "depth": 0,
        "calls": 1,
        "compiled": False,
        "owner": None,
        "parameters": 0,
        "trainable_parameters": 0,
        "parameter_bytes": 0,
        "trainable_parameter_bytes": 0,
        "self_parameters": 0,
        "local_parameters": 0,
        "local_parameter_bytes": 0,
        "dtypes": {},
        "peak_bytes": None,
    }
    return ModuleProfile(**(nothing | {phase: work() for phase in PHASES} | fields))


def cell(module: str, operator: str, phase: Phase, **counts: Any) -> OpCount:
    """One call in float32 that only moved 1 byte; any other field of a `OpCount` that is given."""
    once: dict[str, Any] = {
        "dtype": "float32",
        "calls": 1,
        "macs": 0,
        "executed_macs": 0,
        "flops": 0,
        "bytes_moved": 1,
    }
    return OpCount(module=module, operator=operator, phase=phase, **(once | counts))


def product(module: str, operator: str, phase: Phase, *, macs: int, bytes_moved: int) -> OpCount:
    """One matrix product in float32."""
    return cell(
        module,
        operator,
        phase,
        macs=macs,
        executed_macs=macs,
        flops=2 * macs,
        bytes_moved=bytes_moved,
    )


def run(**fields: Any) -> Run:
    """Any field of a `Run`; without any, a count on a CPU."""
    counted: dict[str, Any] = {
        "kind": "count",
        "created": "2026-01-02T03:04:05Z",
        "versions": {"torch": "2.13.0"},
        "host": "node0",
        "device_name": "cpu",
        "dtype": "float32",
        "shapes": {"0": (4, 8)},
    }
    return Run(**(counted | fields))


def works(
    names: Iterable[str], cells: Iterable[OpCount], communication: Iterable[Communication] = ()
) -> dict[str, dict[str, Work]]:
    """The work of each module in each phase.

    Its own is the sum of its cells, the inclusive adds all modules below it.
    """
    counts: dict[str, dict[str, dict[str, int]]] = {
        name: {phase: {} for phase in PHASES} for name in names
    }

    def count(module: str, phase: Phase, added: Mapping[str, int]) -> None:
        for name in ancestry(module):
            for field, number in added.items():
                for counted in (field, f"self_{field}") if name == module else (field,):
                    counts[name][phase][counted] = counts[name][phase].get(counted, 0) + number

    for each in cells:
        count(
            each.module,
            each.phase,
            {field: getattr(each, field) for field in COUNTS if field != "comm_bytes"},
        )
    for collective in communication:
        count(collective.module, collective.phase, {"comm_bytes": collective.bytes})
    return {
        name: {phase: work(**counted) for phase, counted in phases.items()}
        for name, phases in counts.items()
    }


def profile(
    rows: Mapping[str, Mapping[str, Any]], cells: Iterable[OpCount], **fields: Any
) -> Profile:
    """Rows given by what is special about each, with the work that the cells and the communication add up to."""
    cells = tuple(cells)
    counted = works(rows, cells, fields.get("communication", ()))
    modules = {
        name: module_profile(**({"depth": len(ancestry(name)) - 1} | counted[name] | dict(row)))
        for name, row in rows.items()
    }
    counted_profile: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "run": run(),
        "modules": modules,
        "op_counts": cells,
        "unsupported": (),
    }
    return Profile(**(counted_profile | fields))


def weights(own: int, below: int = 0) -> dict[str, Any]:
    """The fields of a row that has `own` float32 parameters itself and `below` in the rows below it."""
    total = own + below
    fields = {"parameters": total, "trainable_parameters": total, "self_parameters": own}
    fields |= {"parameter_bytes": 4 * total, "trainable_parameter_bytes": 4 * total}
    local = {"local_parameters": total, "local_parameter_bytes": 4 * total}
    return (
        fields
        | local
        | {"dtypes": {"float32": DtypeShare(parameters=total, bytes=4 * total)} if total else {}}
    )


def small_profile() -> Profile:
    """Two training steps of `encoder = Sequential(Linear(8, 16), GELU())` and `head = Linear(16, 2)` on a batch of 4, on 2 ranks.

    By hand: the encoder's product has 4 * 8 * 16 = 512 MACs, forward and for its weight's gradient
    (the input needs none); the head's has 4 * 16 * 2 = 128, forward and for both gradients. So 640
    MACs forward, 512 + 2 * 128 = 768 backward.
    """
    cells = (
        product(
            "encoder.0",
            "aten::addmm",
            "forward",
            macs=512,
            bytes_moved=4 * (4 * 8 + 8 * 16 + 16 + 4 * 16),
        ),
        cell("encoder.1", "aten::gelu", "forward", flops=64, bytes_moved=4 * (64 + 64)),
        product(
            "head",
            "aten::addmm",
            "forward",
            macs=128,
            bytes_moved=4 * (4 * 16 + 16 * 2 + 2 + 4 * 2),
        ),
        product(
            "head", "aten::mm", "backward", macs=256, bytes_moved=4 * 2 * (4 * 2 + 4 * 16 + 16 * 2)
        ),
        cell(
            "encoder.1", "aten::gelu_backward", "backward", flops=64, bytes_moved=4 * (64 + 64 + 64)
        ),
        product(
            "encoder.0", "aten::mm", "backward", macs=512, bytes_moved=4 * (4 * 8 + 4 * 16 + 8 * 16)
        ),
        cell("encoder.0", "aten::_foreach_add_", "optimizer", flops=144, bytes_moved=4 * 3 * 144),
        cell("head", "aten::_foreach_add_", "optimizer", flops=34, bytes_moved=4 * 3 * 34),
        cell("", "aten::mse_loss", "other", flops=24, bytes_moved=4 * (8 + 8 + 1)),
    )
    rows: dict[str, dict[str, Any]] = {
        "": weights(0, 178) | {"class_name": "Model", "peak_bytes": 3000},
        "encoder": weights(0, 144) | {"class_name": "Sequential", "peak_bytes": 2000},
        "encoder.0": weights(144) | {"class_name": "Linear", "peak_bytes": 1900},
        "encoder.1": weights(0) | {"class_name": "GELU", "peak_bytes": 2000},
        "head": weights(34) | {"class_name": "Linear", "peak_bytes": 3000},
    }
    reduction = Communication(
        module="",
        phase="backward",
        collective="all_reduce",
        group="dp",
        group_size=2,
        calls=1,
        bytes=712,
        seconds=2e-5,
    )
    not_in_the_list: Any = "rank_missing"  # as of a later version: kept, and shown as it is
    timed = profile(
        rows,
        cells,
        run=run(
            kind="training",
            stage="fit",
            step=8,
            window=0,
            strategy="ddp",
            world_size=2,
            data_parallel_size=2,
            samples_per_step=4,
        ),
        unsupported=(
            UnsupportedCall(
                module="head", operator="my_ops::scan", phase="forward", calls=2, bytes=64
            ),
        ),
        communication=(reduction,),
        steps=(
            Step(
                index=7,
                kind="unprofiled",
                seconds=3e-3,
                phases={"data": 2e-4, "forward": 1e-3, "backward": 1.5e-3},
                samples=4,
            ),
            Step(
                index=8, kind="counting", seconds=None, phases={}, samples=4, marks=("new_shapes",)
            ),
        ),
        memory=small_memory(),
        timelines=small_timeline(),
        trace=small_trace(),
        ranks=(
            Rank(
                rank=0,
                node="0",
                host="node0",
                device="cpu",
                coordinates={"dp": 0},
                status="ok",
                step=spread(3e-3),
                macs=1408,
            ),
            Rank(rank=1, node=None, host=None, device=None, coordinates={}, status="missing"),
        ),
        rank_stats=(
            RankStat(module="head", phase="forward", low=1e-4, median=2e-4, high=3e-4, high_rank=1),
        ),
        rank_comparison=small_comparison(),
        unprofiled_comparison=small_clean_comparison(),
        notes=(
            Note(
                code=not_in_the_list,
                subject="1",
                values={"waited_seconds": 30.0, "tries": 3, "host": "node1"},
            ),
        ),
    )
    return with_seconds(timed)


def small_comparison() -> RankComparison:
    """Rank 1 takes 0.2 ms longer in the head, in each of six steps of 3 ms; rank 0 waits for that."""
    excess = RankDelay(
        module="head",
        phase="forward",
        rank=1,
        seconds=3e-4,
        usual=1e-4,
        excess=(2e-4,) * 6,
        late=(2e-4,) * 6,
        intervals=(0,),
        noise=1e-6,
        largest_of_others=(1e-5,),
    )
    wait = RankWait(
        module="", phase="backward", for_rank=1, ranks=1, seconds=2e-4, longest=2e-4, longest_rank=0
    )
    return RankComparison(
        steps=6,
        seconds=3e-3,
        lost_seconds=2e-4,
        delays=(excess,),
        waits=(wait,),
        large_excesses=(0, 6),
        large_excess_seconds=18e-3,
        places=2,
    )


def small_clean_comparison() -> RankComparison:
    """The same in six clean steps: it is forward, and nothing of the system's."""
    hooked = small_comparison()
    (excess,), (wait,) = hooked.delays, hooked.waits
    usual = RankActivity(rank=1, late=2e-4, waited=0.0, other_threads=0.0, units_ratio=1.0)
    return replace(
        hooked,
        delays=(replace(excess, module=""),),
        waits=(replace(wait, phase="wait"),),
        usual_lost_seconds=2e-4,
        at=(2, 3, 4, 5, 6, 7),
        awaited=("sync", "wait"),
        activity=(usual,),
    )


def small_memory() -> Memory:
    """4 operators, of which the third reaches the peak."""
    return Memory(
        source="counted",
        peak_bytes=3000,
        peak_index=2,
        by_category={"parameters": 712, "activations": 2288},
        by_module={"": 0, "encoder.0": 2832, "head": 168},
        alive=(
            Allocation("activations", "aten::addmm", "encoder.0", "forward", 2288),
            Allocation("parameters", "", "head", "other", 136),
        ),
        timeline=(
            Moment("aten::addmm", "encoder.0", "forward", 712, 0, ByCategory(712, 0, 0, 0, 0, 0)),
            Moment(
                "aten::gelu", "encoder.1", "forward", 2000, 1, ByCategory(712, 0, 0, 1288, 0, 0)
            ),
            Moment("aten::addmm", "head", "forward", 3000, 2, ByCategory(712, 0, 0, 2288, 0, 0)),
            Moment("aten::mm", "head", "backward", 2500, 3, ByCategory(712, 136, 0, 1288, 364, 0)),
        ),
    )


def small_timeline() -> tuple[StepTimeline, ...]:
    """A step of 3 ms that was traced on rank 0 and had hooks on rank 1.

    Forward in its first ms, backward in the second.
    """
    places = [
        ("", 0, 1_000_000, 0),
        ("encoder", 0, 700_000, 1),
        ("encoder.0", 0, 500_000, 2),
        ("encoder.1", 500_000, 200_000, 2),
    ]
    forward = [
        ModuleSlice(row, "forward", start, length, depth)
        for row, start, length, depth in [*places, ("head", 700_000, 300_000, 1)]
    ]
    backward = [
        ModuleSlice("", "backward", 1_000_000, 1_000_000, 0),
        ModuleSlice("head", "backward", 1_000_000, 600_000, 1),
        ModuleSlice("encoder", "backward", 1_600_000, 400_000, 1),
    ]
    slices = (*forward, *backward, ModuleSlice("", "optimizer", 2_000_000, 900_000, 0))
    operators = tuple(TimedWork("aten::addmm", start, 200_000) for start in (0, 700_000))
    kernels = (
        TimedWork("gemm", 100_000, 150_000),
        TimedWork("gemm", 800_000, 150_000),
        TimedWork("copy", 900_000, 10_000, 1),
    )
    return (
        StepTimeline(
            rank=0,
            source="traced",
            length=3_000_000,
            slices=slices,
            operators=operators,
            kernels=kernels,
            left_out=(0, 2, 0),
        ),
        StepTimeline(rank=1, source="module_timing", length=2_900_000, slices=slices[:6]),
    )


def small_trace() -> Trace:
    """One file and one operator."""
    addmm = TracedOperator(
        name="aten::addmm",
        calls=2,
        host_seconds=2e-4,
        self_host_seconds=1e-4,
        device_seconds=3e-5,
        self_device_seconds=3e-5,
    )
    return Trace(
        files={"0": "node0_0.pt.trace.json.gz"},
        batches=2,
        device_idle_seconds=1e-3,
        operators=(addmm,),
    )


def scan_traced() -> Profile:
    """The small profile with a trace in which the operator without a formula took 10 µs a batch on the device."""
    given = small_profile()
    scan = TracedOperator(
        name="my_ops::scan",
        calls=4,
        host_seconds=2e-5,
        self_host_seconds=2e-5,
        device_seconds=2e-5,
        self_device_seconds=2e-5,
    )
    trace = small_trace()
    return Profile(
        **fields_of(given)
        | {"trace": Trace(**fields_of(trace) | {"operators": (*trace.operators, scan)})}
    )


def with_seconds(counted: Profile) -> Profile:
    """The same profile with a time in every work that ran anything: 100 µs an operator call."""

    def timed(given: Work) -> dict[str, Any]:
        kernels = {"device_seconds": spread(5e-5 * given.calls)} if given.calls else {}
        own = {"self_seconds": spread(1e-4 * given.self_calls)} if given.self_calls else {}
        return {"seconds": spread(1e-4 * given.calls)} | kernels | own if given.calls else {}

    def row(given: ModuleProfile) -> ModuleProfile:
        fields = {field: getattr(given, field) for field in given.__struct_fields__}
        return ModuleProfile(
            **fields
            | {
                phase: Work(**fields_of(given.work(phase)) | timed(given.work(phase)))
                for phase in PHASES
            }
        )

    return Profile(
        **fields_of(counted)
        | {"modules": {name: row(each) for name, each in counted.modules.items()}}
    )


def clocked(counted: Profile, own: Mapping[tuple[str, Phase], float]) -> Profile:
    """The same profile with these times of modules themselves in phases, and with those of all modules above that they add up to."""

    def timed(name: str, phase: Phase, given: Work) -> Work:
        inside = [
            seconds
            for (module, when), seconds in own.items()
            if when == phase and name in ancestry(module)
        ]
        fields = {"seconds": spread(sum(inside), n=8) if inside else None}
        return Work(
            **fields_of(given)
            | fields
            | ({"self_seconds": spread(own[name, phase])} if (name, phase) in own else {})
        )

    def row(name: str, given: ModuleProfile) -> ModuleProfile:
        return ModuleProfile(
            **fields_of(given) | {phase: timed(name, phase, given.work(phase)) for phase in PHASES}
        )

    return Profile(
        **fields_of(counted)
        | {"modules": {name: row(name, each) for name, each in counted.modules.items()}}
    )


def untimed(given: Profile) -> Profile:
    """The same profile as a count would have left it.

    Without a time in any work, and without steps.
    """

    def row(each: ModuleProfile) -> ModuleProfile:
        fields = {
            phase: dict.fromkeys(("seconds", "self_seconds", "device_seconds")) for phase in PHASES
        }
        return ModuleProfile(
            **fields_of(each)
            | {phase: Work(**fields_of(each.work(phase)) | fields[phase]) for phase in PHASES}
        )

    return Profile(
        **fields_of(given)
        | {"modules": {name: row(each) for name, each in given.modules.items()}, "steps": ()}
    )


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a struct, to make another one with some of them changed."""
    return {field: getattr(value, field) for field in value.__struct_fields__}


def profile_of(n_modules: int) -> Profile:
    """A profile of so many rows, 9 cells in each but the containers.

    A root, blocks below it, 10 layers in each block.
    """
    names = (f"blocks.{block}.layers.{layer}" for block in range(n_modules) for layer in range(10))
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < n_modules:
        for above in reversed(ancestry(name := next(names))):
            if len(rows) < n_modules:
                rows.setdefault(above, {"class_name": "Linear" if above == name else "ModuleList"})
    operators: tuple[tuple[str, Phase], ...] = (
        ("aten::addmm", "forward"),
        ("aten::add", "forward"),
        ("aten::gelu", "forward"),
        ("aten::mm", "backward"),
        ("aten::sum", "backward"),
        ("aten::gelu_backward", "backward"),
        ("aten::_foreach_mul_", "optimizer"),
        ("aten::_foreach_add_", "optimizer"),
        ("aten::clone", "other"),
    )
    cells = (
        product(name, operator, phase, macs=1 << 30, bytes_moved=1 << 20)
        for name in rows
        for operator, phase in operators
    )
    return with_seconds(profile(rows, cells))
