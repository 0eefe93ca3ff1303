"""Ties the device's work to what launched it on the host.

The operator, the modules and the scopes around the launch.

    host     scope [ aten::linear [ aten::addmm [ cudaLaunchKernel ] ] ]
    device                                          kernel               own work of addmm, inclusive of linear and of the scope

On each thread what the host does is nested by its times. The launch's number, `correlation`, is the
kernel's too.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from lflops.profile.series import grouped, summed
from lflops.trace.analysis.categories import precision_by_name
from lflops.trace.annotate import threads_of_tracks
from lflops.trace.recorded import (
    NODE,
    Collective,
    DeviceEvent,
    HostItem,
    Inputs,
    OperatorCall,
    RecordedTrace,
    RuntimeCall,
    SliceTimes,
    Span,
    outer_first,
)

_OperatorKey = tuple[str, Inputs | None]


@dataclass(slots=True)
class OperatorSums(SliceTimes):
    """All calls of an operator with one set of inputs."""

    inputs: Inputs | None = None
    counted_calls: int = (
        # calls whose cost counts: those within an operator that is counted itself are its parts
        0
    )
    # the device's time of these, inclusive
    counted_device: int = 0
    # its own device time in no operator that is counted
    unsupported_device: int = 0
    # whether it called another operator
    has_operators: bool = False
    # whether a kernel of its counted calls is named after TF32, which inputs of fp32 do not tell
    has_tf32: bool = False


@dataclass(slots=True)
class SpanSums(SliceTimes):
    """All stretches of a module or a scope in one phase."""

    kind: str = "scope"
    phase: str = "forward"


class Launch(NamedTuple):
    """What launched some work of the device.

    The call, the innermost operator, the one that is counted, the collective.
    """

    call: RuntimeCall | None = None
    operator: OperatorSums | None = None
    counted: OperatorSums | None = None
    collective: Collective | None = None


NOT_RECORDED = Launch()


@dataclass(slots=True)
class HostWalk:
    """What the host did, summed, and the launch of each piece of work, by the launch's number."""

    operators: dict[_OperatorKey, OperatorSums] = field(default_factory=dict)
    spans: dict[tuple[str, str, str], SpanSums] = field(default_factory=dict)
    launches: dict[int, Launch] = field(default_factory=dict)
    # Each counted call: when it began, the operator, and whether it computes again what forward
    # computed
    counted: list[tuple[int, OperatorSums, bool]] = field(default_factory=list)
    # Of work whose launch was not recorded, by the number that its operator has too
    by_external: dict[int, Launch] = field(default_factory=dict)

    def launch(self, work: DeviceEvent) -> Launch:
        """Find what launched a piece of work; `NOT_RECORDED` where the trace does not tell."""
        return self.launches.get(work.correlation) or self.by_external.get(
            work.external, NOT_RECORDED
        )

    def call(self, work: DeviceEvent) -> RuntimeCall | None:
        return self.launch(work).call


@dataclass(slots=True)
class _Open:
    start: int
    end: int
    collective: Collective | None = None
    # What the slices within it inherit:
    # the innermost one, this one included
    operator: OperatorSums | None = None
    operator_end: int = 0
    is_within_counted: bool = False
    is_backward: bool = False
    module: str | None = (
        # the innermost module; in backward the one whose forward made the node
        None
    )
    # the outermost node of backward
    node: OperatorCall | None = None
    # the outermost operator in it that is one of forward
    again: OperatorCall | None = None
    # What is its own:
    span: SpanSums | None = None
    is_counted: bool = False


def walk(
    trace: RecordedTrace, work: Iterable[DeviceEvent], is_counted: Callable[[OperatorCall], bool]
) -> HostWalk:
    """Go through what each thread did, for some work of the device."""
    # `is_counted` tells whether an operator has a cost. Operators within one that has are its
    # parts, and not counted again.
    found = HostWalk()
    nanoseconds = summed((each.correlation, each.end - each.start) for each in work)
    walker = _Walker(found, nanoseconds, is_counted)
    places = _slice_threads(trace)
    launching = (call for call in trace.runtime if call.correlation in nanoseconds)
    asked: Iterator[HostItem] = chain(trace.spans, trace.operators, launching)
    by_thread = grouped(asked, lambda each: places.get(each.thread, each.thread))
    threads = {span.thread for span in trace.spans}
    for thread in sorted(by_thread, key=lambda thread: (thread not in threads, thread)):
        walker.thread(by_thread[thread])
    found.counted = [
        (call.start, sums, is_again)
        for (call, sums, *_), is_again in zip(walker.counted, walker.recomputed(), strict=True)
    ]
    known = {call.external: call for call in trace.operators if call.external}
    for each in work:
        launch = found.launches.get(each.correlation, NOT_RECORDED)
        if launch.counted is not None and precision_by_name(each.name) == "tf32":
            launch.counted.has_tf32 = True
        if launch is NOT_RECORDED and each.external in known:
            walker.unlaunched(each, known[each.external])
    return found


def _slice_threads(trace: RecordedTrace) -> dict[int, int]:
    """The threads that the slices of lflops, which have their own tracks, were recorded on.

    Where no node tells, the one of the steps.
    """
    nodes = {call.start: call.thread for call in trace.operators if call.name.startswith(NODE)}
    steps = Counter(span.thread for span in trace.spans if span.kind == "step")
    slices = [(span.thread, span.start) for span in trace.spans if span.kind == "slice"]
    trainers = {track: steps.most_common(1)[0][0] for track, _ in slices} if steps else {}
    return trainers | threads_of_tracks(slices, nodes)


@dataclass(slots=True)
class _Walker:
    found: HostWalk
    nanoseconds: Mapping[int, int]
    is_counted: Callable[[OperatorCall], bool]
    module_of: dict[int, str] = field(default_factory=dict)
    # Each counted call with its operator, the node of backward around it, and the operator of
    # forward in that
    counted: list[tuple[OperatorCall, OperatorSums, OperatorCall | None, OperatorCall | None]] = (
        field(default_factory=list)
    )
    nodes: defaultdict[int, list[OperatorCall]] = field(
        default_factory=lambda: defaultdict(list)
        # by sequence, those in no other
    )
    # in no node
    forward: list[OperatorCall] = field(default_factory=list)

    def thread(self, items: Iterable[HostItem]) -> None:
        opened: list[_Open] = []
        for item in outer_first(items, opened):
            if isinstance(item, RuntimeCall):
                self._launch(item, opened)
                continue
            inside = _Open(item.start, item.end, item.collective)
            if opened:
                around = opened[-1]
                inside.operator, inside.operator_end = around.operator, around.operator_end
                inside.is_within_counted, inside.is_backward = (
                    around.is_within_counted,
                    around.is_backward,
                )
                inside.module, inside.node, inside.again = around.module, around.node, around.again
            if isinstance(item, Span):
                self._span(item, inside, opened)
            else:
                self._operator(item, inside, opened)
            opened.append(inside)

    def recomputed(self) -> Iterator[bool]:
        """Tell of each counted call whether activation checkpointing makes it again, within a node of backward."""
        # Only operators that autograd records have a sequence number there: those of checkpointing,
        # and with `create_graph` those of backward itself. The nodes of the latter run later,
        # outside of this node. Each thread has its own sequence.
        numbers: defaultdict[int, Counter[int]] = defaultdict(
            Counter
            # of threads, as nodes have them
        )
        for call in self.forward:
            numbers[call.thread].update(
                each.forward_thread for each in self.nodes.get(call.sequence, ())
            )
        known = {
            thread: counts.most_common(1)[0][0] for thread, counts in numbers.items() if counts
        }
        for _, _, node, again in self.counted:
            if node is None or again is None:
                yield False
                continue
            later = [
                each.forward_thread
                for each in self.nodes.get(again.sequence, ())
                if each.start >= node.end
            ]
            yield not any(
                number == known[again.thread]
                if again.thread in known
                else number not in known.values()
                for number in later
            )

    def unlaunched(self, work: DeviceEvent, call: OperatorCall) -> None:
        """Add work whose launch was not recorded to the operator that it names."""
        sums = self._sums(call)
        sums.device += work.end - work.start
        sums.self_device += work.end - work.start
        sums.unsupported_device += work.end - work.start
        self.found.by_external[work.external] = Launch(operator=sums)

    def _sums(self, call: OperatorCall) -> OperatorSums:
        key = call.name, call.inputs
        return self.found.operators.get(key) or self.found.operators.setdefault(
            key, OperatorSums(call.name, inputs=call.inputs)
        )

    def _spans(self, kind: str, name: str, phase: str) -> SpanSums:
        key = kind, name, phase
        return self.found.spans.get(key) or self.found.spans.setdefault(
            key, SpanSums(name, kind=kind, phase=phase)
        )

    def _operator(self, call: OperatorCall, inside: _Open, opened: Sequence[_Open]) -> None:
        sums, took = self._sums(call), call.end - call.start
        sums.calls += 1
        sums.self_host += took
        if inside.operator is None or not any(
            each.operator is not None and each.operator.name == call.name for each in opened
        ):
            sums.host += took
        if inside.operator is not None:
            inside.operator.has_operators = True
            inside.operator.self_host -= min(call.end, inside.operator_end) - call.start
        inside.operator, inside.operator_end = sums, call.end
        is_node = call.name.startswith(NODE)
        self._find_node(call, inside, is_node=is_node)
        if not inside.is_within_counted and self.is_counted(call):
            inside.is_counted = inside.is_within_counted = True
            sums.counted_calls += 1
            self.counted.append((call, sums, inside.node, inside.again))
        if is_node:
            backward_of = self.module_of.get(call.sequence)
            if backward_of is not None:
                inside.span = self._spans("module", backward_of, "backward")
                inside.span.calls += 1
                inside.module, inside.is_backward = backward_of, True
        elif call.sequence >= 0 and inside.module is not None and not inside.is_backward:
            self.module_of[call.sequence] = inside.module

    def _find_node(self, call: OperatorCall, inside: _Open, *, is_node: bool) -> None:
        if inside.node is None or inside.node.end <= call.start:
            inside.node, inside.again = call if is_node else None, None
            if is_node:
                self.nodes[call.sequence].append(call)
            elif call.sequence >= 0:
                self.forward.append(call)
        elif inside.again is None or inside.again.end <= call.start:
            is_of_forward = (
                not is_node
                and call.sequence not in {-1, inside.node.sequence}
                and not call.forward_thread
            )
            inside.again = call if is_of_forward else None

    def _span(self, span: Span, inside: _Open, opened: Sequence[_Open]) -> None:
        kind = "module" if span.kind == "slice" else span.kind
        name = (
            span.name.removeprefix("nn.Module: ")
            if span.kind == "module"
            else span.name or "(model)"
        )
        inside.span = self._spans(kind, name, span.phase)
        inside.span.calls += 1
        if not any(each.span is inside.span for each in opened):
            inside.span.host += span.end - span.start
        if kind == "module":
            inside.module = name

    def _launch(self, call: RuntimeCall, stack: Sequence[_Open]) -> None:
        """Give the work of a launch to all that is open."""
        took = self.nanoseconds[call.correlation]
        innermost = counted = None
        inner_spans: set[str] = set()
        names: set[str] = set()
        seen: set[int] = set()
        for each in reversed(stack):
            if each.operator is not None and each.operator.name not in names:
                names.add(each.operator.name)
                each.operator.device += took
                if innermost is None:
                    innermost = each.operator
                    innermost.self_device += took
            if each.is_counted and each.operator is not None:
                counted = each.operator
                counted.counted_device += took
            if each.span is not None and id(each.span) not in seen:
                seen.add(id(each.span))
                each.span.device += took
                if each.span.kind not in inner_spans:
                    inner_spans.add(each.span.kind)
                    each.span.self_device += took
        if innermost is not None and counted is None:
            innermost.unsupported_device += took
        about = [each.collective for each in stack if each.collective is not None]
        collective = min(about, key=lambda each: each.group_size is None, default=None)
        self.found.launches[call.correlation] = Launch(call, innermost, counted, collective)
