"""Handmade profiles for tests.

They are consistent, and small enough to be checked by hand. A function that returns a profile or a
part of one accepts any field of it as a keyword argument, and has a default for the other fields.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
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
    """Return the statistics of `n` times whose quartiles are 10 % below and above the median."""
    return TimingStats(median=median, low=0.9 * median, high=1.1 * median, n=n)


def work(**counts: Any) -> Work:
    """Return a `Work` with these fields. All other counts are 0."""
    zeros = dict.fromkeys(COUNTS, 0)
    for count in COUNTS:
        zeros[f"self_{count}"] = 0
    return Work(**(zeros | counts))


def module_profile(**fields: Any) -> ModuleProfile:
    """Return a `ModuleProfile`. By default it is a root without work and without parameters."""
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
    """Return an `OpCount`. By default it is one call in float32 that moves 1 byte."""
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
    """Return the `OpCount` of one matmul in float32."""
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
    """Return a `Run`. By default it is a count on a CPU."""
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
    """Return the work of each module in each phase.

    The self values of a module are the sums of its op counts and its communication. The inclusive
    values also include all modules below it.
    """
    counts: dict[str, dict[str, Counter[str]]] = {}
    for name in names:
        counts[name] = {phase: Counter() for phase in PHASES}

    def count(module: str, phase: Phase, added: Mapping[str, int]) -> None:
        for name in ancestry(module):
            counts[name][phase].update(added)
        for field, number in added.items():
            counts[module][phase][f"self_{field}"] += number

    for each in cells:
        added = {field: getattr(each, field) for field in COUNTS if field != "comm_bytes"}
        count(each.module, each.phase, added)
    for collective in communication:
        count(collective.module, collective.phase, {"comm_bytes": collective.bytes})
    found: dict[str, dict[str, Work]] = {}
    for name, phases in counts.items():
        found[name] = {phase: work(**counted) for phase, counted in phases.items()}
    return found


def profile(
    rows: Mapping[str, Mapping[str, Any]], cells: Iterable[OpCount], **fields: Any
) -> Profile:
    """Return a profile whose modules have the work of these op counts.

    Args:
        rows: For each module, the fields that differ from the default of `module_profile`.
        cells: The op counts.
        **fields: Further fields of the profile. The bytes of `communication` are added to the work.
    """
    cells = tuple(cells)
    counted = works(rows, cells, fields.get("communication", ()))
    modules = {}
    for name, row in rows.items():
        depth = len(ancestry(name)) - 1
        modules[name] = module_profile(**({"depth": depth} | counted[name] | dict(row)))
    counted_profile: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "run": run(),
        "modules": modules,
        "op_counts": cells,
        "unsupported": (),
    }
    return Profile(**(counted_profile | fields))


def weights(own: int, below: int = 0) -> dict[str, Any]:
    """Return the fields of a module with float32 parameters.

    `own` is the number of parameters of the module itself, `below` the number in its submodules.
    """
    total = own + below
    dtypes = {}
    if total:
        dtypes["float32"] = DtypeShare(parameters=total, bytes=4 * total)
    return {
        "parameters": total,
        "trainable_parameters": total,
        "self_parameters": own,
        "parameter_bytes": 4 * total,
        "trainable_parameter_bytes": 4 * total,
        "local_parameters": total,
        "local_parameter_bytes": 4 * total,
        "dtypes": dtypes,
    }


def small_profile() -> Profile:
    """Return the profile of two training steps of a small model on 2 ranks.

    The model is `encoder = Sequential(Linear(8, 16), GELU())` and `head = Linear(16, 2)`, and the
    batch has 4 samples.

    The matmul of the encoder has 4 * 8 * 16 = 512 MACs. It runs in forward, and in backward for the
    gradient of the weight; the input needs no gradient. The matmul of the head has 4 * 16 * 2 = 128
    MACs. It runs in forward, and in backward for both gradients. So there are 512 + 128 = 640 MACs
    in forward and 512 + 2 * 128 = 768 in backward.
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
    # A note of a later version: it is kept, and shown without a sentence.
    not_in_the_list: Any = "rank_missing"
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
    """Return a comparison of ranks over six module-timing steps of 3 ms.

    In each step, rank 1 takes 0.2 ms longer in the head, and rank 0 waits for it.
    """
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
    """Return the comparison of the same ranks over six unprofiled steps.

    These steps only show that rank 1 is late in forward. The system is not the cause: the training
    thread did not wait for its core, no other threads ran, and the batches had the usual size.
    """
    hooked = small_comparison()
    (excess,) = hooked.delays
    (wait,) = hooked.waits
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
    """Return the memory of a step with 4 operators. The third one reaches the peak."""
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
    """Return the timelines of a step of 3 ms: traced on rank 0, and with module timing on rank 1.

    Forward takes the first millisecond and backward the second.
    """
    forward = [
        ModuleSlice("", "forward", 0, 1_000_000, 0),
        ModuleSlice("encoder", "forward", 0, 700_000, 1),
        ModuleSlice("encoder.0", "forward", 0, 500_000, 2),
        ModuleSlice("encoder.1", "forward", 500_000, 200_000, 2),
        ModuleSlice("head", "forward", 700_000, 300_000, 1),
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
    """Return a trace with one file and one operator."""
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
    """Return the small profile with an unsupported operator in its trace.

    The operator took 10 µs per batch on the device.
    """
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
    with_scan = replace(trace, operators=(*trace.operators, scan))
    return replace(given, trace=with_scan)


def with_works(given: Profile, changed: Callable[[str, Phase, Work], Work]) -> Profile:
    """Return the same profile with a new `Work` for each module and phase.

    `changed` receives the module's name, the phase and the previous `Work`.
    """
    modules = {}
    for name, module in given.modules.items():
        fields = fields_of(module)
        for phase in PHASES:
            fields[phase] = changed(name, phase, module.work(phase))
        modules[name] = ModuleProfile(**fields)
    return replace(given, modules=modules)


def with_seconds(counted: Profile) -> Profile:
    """Return the same profile with times: 100 µs per operator call, and 50 µs on the device."""

    def timed(_name: str, _phase: Phase, given: Work) -> Work:
        if not given.calls:
            return given
        fields = {
            "seconds": spread(1e-4 * given.calls),
            "device_seconds": spread(5e-5 * given.calls),
        }
        if given.self_calls:
            fields["self_seconds"] = spread(1e-4 * given.self_calls)
        return Work(**(fields_of(given) | fields))

    return with_works(counted, timed)


def clocked(counted: Profile, own: Mapping[tuple[str, Phase], float]) -> Profile:
    """Return the same profile with these self times in seconds, by module and phase.

    The inclusive time of a module is the sum of the self times of the module and all modules below
    it.
    """

    def timed(name: str, phase: Phase, given: Work) -> Work:
        inside = []
        for (module, when), seconds in own.items():
            if when == phase and name in ancestry(module):
                inside.append(seconds)
        fields = fields_of(given)
        fields["seconds"] = spread(sum(inside), n=8) if inside else None
        if (name, phase) in own:
            fields["self_seconds"] = spread(own[name, phase])
        return Work(**fields)

    return with_works(counted, timed)


def untimed(given: Profile) -> Profile:
    """Return the same profile without steps and without times, as a count would return it."""
    no_times: dict[str, Any] = dict.fromkeys(("seconds", "self_seconds", "device_seconds"))

    def without_times(_name: str, _phase: Phase, timed: Work) -> Work:
        return Work(**(fields_of(timed) | no_times))

    return replace(with_works(given, without_times), steps=())


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a struct."""
    return {field: getattr(value, field) for field in value.__struct_fields__}


def profile_of(n_modules: int) -> Profile:
    """Return a profile with so many modules.

    The root contains blocks with 10 layers each. Every module has 9 op counts.
    """
    rows: dict[str, dict[str, Any]] = {}
    number = 0
    while len(rows) < n_modules:
        name = f"blocks.{number // 10}.layers.{number % 10}"
        number += 1
        for above in reversed(ancestry(name)):
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
    cells = []
    for name in rows:
        for operator, phase in operators:
            cells.append(product(name, operator, phase, macs=1 << 30, bytes_moved=1 << 20))
    return with_seconds(profile(rows, cells))
