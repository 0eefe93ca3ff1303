"""Ties the device's work to what launched it on the host: the operator, the modules and the scopes around the launch.

    host     scope [ aten::linear [ aten::addmm [ cudaLaunchKernel ] ] ]
    device                                          kernel               own work of addmm, inclusive of linear and of the scope

On each thread what the host does is nested by its times. The launch's number, `correlation`, is the kernel's too.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lflops.profile.series import grouped
from lflops.trace_analysis.categories import precision_by_name
from lflops.traces.recorded import NODE, Collective, DeviceWork, Inputs, OperatorCall, RecordedTrace, RuntimeCall, Span

_OperatorKey = tuple[str, Inputs | None]


@dataclass(slots=True)
class OperatorSums:
    """All calls of an operator with one set of inputs; times in nanoseconds, inclusive and its own."""

    name: str
    inputs: Inputs | None
    calls: int = 0
    host: int = 0
    own_host: int = 0
    device: int = 0
    own_device: int = 0
    kernels: int = 0
    counted_calls: int = 0  # calls whose cost counts: those within an operator that is counted itself are its parts
    counted_device: int = 0  # the device's time of these, inclusive
    uncounted_device: int = 0  # its own device time in no operator that is counted
    has_operators: bool = False  # whether it called another operator
    has_tf32: bool = False  # whether a kernel of its counted calls is named after TF32, which inputs of fp32 do not tell


@dataclass(slots=True)
class SpanSums:
    """All stretches of a module or a scope in one phase."""

    kind: str
    name: str
    phase: str
    calls: int = 0
    host: int = 0
    device: int = 0
    own_device: int = 0


class Launch(NamedTuple):
    """What launched some work of the device: the call, the innermost operator, the one that is counted, the module, the collective."""

    call: RuntimeCall | None
    operator: OperatorSums | None
    counted: OperatorSums | None
    module: str | None
    collective: Collective | None


@dataclass(slots=True)
class HostWalk:
    """What the host did, summed, and the launch of each piece of work, by the launch's number."""

    operators: dict[_OperatorKey, OperatorSums] = field(default_factory=dict)
    spans: dict[tuple[str, str, str], SpanSums] = field(default_factory=dict)
    launches: dict[int, Launch] = field(default_factory=dict)
    # Each counted call: when it began, the operator, and whether it computes again what forward computed
    counted: list[tuple[int, OperatorSums, bool]] = field(default_factory=list)
    # Operators of work whose launch was not recorded, by the number that both have
    by_external: dict[int, OperatorSums] = field(default_factory=dict)

    def launch(self, work: DeviceWork) -> Launch | None:
        """Find what launched a piece of work; `None` where the trace does not tell."""
        found = self.launches.get(work.correlation)
        if found is None and work.external in self.by_external:
            return Launch(None, self.by_external[work.external], None, None, None)
        return found

    def call(self, work: DeviceWork) -> RuntimeCall | None:
        """The call that launched a piece of work."""
        found = self.launches.get(work.correlation)
        return found and found.call


@dataclass(slots=True)
class _Open:
    end: int
    start: int
    operator: OperatorSums | None = None
    span: SpanSums | None = None
    collective: Collective | None = None
    around: "_Open | None" = None  # the innermost operator, this one included
    is_counted: bool = False
    is_within_counted: bool = False
    is_double: bool = False  # whether one of the same name is around it
    is_backward: bool = False
    children: int = 0  # nanoseconds of the operators directly within
    module: str | None = None  # the innermost module; in backward the one whose forward made the node


def walk(trace: RecordedTrace, work: Iterable[DeviceWork], is_counted: Callable[[OperatorCall], bool]) -> HostWalk:
    """Go through what each thread did, for some work of the device.

    `is_counted` tells whether an operator has a cost. Operators within one that has are its parts, and not counted again.
    """
    found = HostWalk()
    nanoseconds: Counter[int] = Counter()
    kernels: Counter[int] = Counter()
    for each in work:
        nanoseconds[each.correlation] += each.end - each.start
        kernels[each.correlation] += 1
    walker = _Walker(found, nanoseconds, kernels, is_counted, _recomputed(trace.operators))
    by_thread = _by_thread(trace, nanoseconds)
    threads = {span.thread for span in trace.spans}
    for thread in sorted(by_thread, key=lambda thread: (thread not in threads, thread)):
        walker.thread(by_thread[thread])
    known = {call.external: call for call in trace.operators if call.external}
    for each in work:
        launch = found.launches.get(each.correlation)
        if launch is not None and launch.counted is not None and precision_by_name(each.name) == "tf32":
            launch.counted.has_tf32 = True
        if each.correlation not in found.launches and each.external in known:
            walker.unlaunched(each, known[each.external])
    return found


def _recomputed(operators: Sequence[OperatorCall]) -> set[tuple[int, int]]:
    """Thread and begin of the calls that activation checkpointing makes again, within a node of backward.

    Only operators that autograd records have a sequence number there: those of checkpointing, and with `create_graph` those of backward
    itself. The nodes of the latter run later, outside of this node. Each thread has its own sequence.
    """
    nodes: defaultdict[int, list[OperatorCall]] = defaultdict(list)  # by sequence, those in no other
    forward: list[OperatorCall] = []
    within: list[tuple[OperatorCall, OperatorCall, OperatorCall]] = []  # a call, the operator of forward around it, the node around that
    node: OperatorCall | None = None
    around: OperatorCall | None = None
    for call in sorted(operators, key=lambda call: (call.thread, call.start, -call.end)):
        is_node = call.name.startswith(NODE)
        if node is None or node.thread != call.thread or node.end <= call.start:
            node, around = call if is_node else None, None
            if is_node:
                nodes[call.sequence].append(call)
            elif call.sequence >= 0:
                forward.append(call)
            continue
        if around is None or around.end <= call.start:
            is_of_forward = not is_node and call.sequence not in {-1, node.sequence} and not call.forward_thread
            around = call if is_of_forward else None
        if around is not None:
            within.append((call, around, node))
    numbers: defaultdict[int, Counter[int]] = defaultdict(Counter)  # of threads, as nodes have them
    for call in forward:
        numbers[call.thread].update(each.forward_thread for each in nodes.get(call.sequence, ()))
    known = {thread: counts.most_common(1)[0][0] for thread, counts in numbers.items() if counts}

    def runs_later(call: OperatorCall, node: OperatorCall) -> bool:
        later = [each.forward_thread for each in nodes.get(call.sequence, ()) if each.start >= node.end]
        return any(number == known[call.thread] if call.thread in known else number not in known.values() for number in later)

    return {(call.thread, call.start) for call, around, node in within if not runs_later(around, node)}


_Item = Span | OperatorCall | RuntimeCall


def _by_thread(trace: RecordedTrace, wanted: Mapping[int, int]) -> dict[int, list[_Item]]:
    places = _slice_threads(trace)
    all_items: list[_Item] = [*trace.spans, *trace.operators, *(call for call in trace.runtime if call.correlation in wanted)]
    return grouped(sorted(all_items, key=lambda item: (item.start, -item.end)), lambda item: places.get(item.thread, item.thread))


def _slice_threads(trace: RecordedTrace) -> dict[int, int]:
    """The threads that the slices of lflops, which have their own tracks, were recorded on: where something begins when they do."""
    begun: defaultdict[int, Counter[int]] = defaultdict(Counter)
    nodes = {call.start: call.thread for call in trace.operators if call.name.startswith(NODE)}
    steps = Counter(span.thread for span in trace.spans if span.kind == "step")
    trainer = steps.most_common(1)[0][0] if steps else None
    tracks = set()
    for span in trace.spans:
        if span.kind == "slice":
            tracks.add(span.thread)
            if span.start in nodes:
                begun[span.thread][nodes[span.start]] += 1
    places = {track: begun[track].most_common(1)[0][0] if begun[track] else trainer for track in tracks}
    return {track: thread for track, thread in places.items() if thread is not None}


@dataclass(slots=True)
class _Walker:
    found: HostWalk
    nanoseconds: Mapping[int, int]
    kernels: Mapping[int, int]
    is_counted: Callable[[OperatorCall], bool]
    again: Collection[tuple[int, int]]
    module_of: dict[int, str] = field(default_factory=dict)
    open_names: Counter[str] = field(default_factory=Counter)

    def thread(self, items: Sequence[_Item]) -> None:
        stack: list[_Open] = []
        for item in items:
            while stack and stack[-1].end <= item.start:
                self._close(stack.pop())
            if isinstance(item, RuntimeCall):
                self._launch(item, stack)
            elif isinstance(item, Span):
                stack.append(self._opened_span(item, stack))
            else:
                above = stack[-1].around if stack else None
                if above is not None and above.operator is not None:
                    above.operator.has_operators = True
                    above.children += min(item.end, above.end) - item.start
                stack.append(self._opened(item, stack))
        while stack:
            self._close(stack.pop())

    def unlaunched(self, work: DeviceWork, call: OperatorCall) -> None:
        """Add work whose launch was not recorded to the operator that it names."""
        sums = self._sums(call)
        sums.device += work.end - work.start
        sums.own_device += work.end - work.start
        sums.uncounted_device += work.end - work.start
        sums.kernels += 1
        self.found.by_external[work.external] = sums

    def _sums(self, call: OperatorCall) -> OperatorSums:
        key = call.name, call.inputs
        sums = self.found.operators.get(key)
        if sums is None:
            sums = self.found.operators[key] = OperatorSums(*key)
        return sums

    def _opened(self, call: OperatorCall, stack: Sequence[_Open]) -> _Open:
        sums = self._sums(call)
        sums.calls += 1
        above = stack[-1] if stack else None
        opened = _Open(call.end, call.start, operator=sums, collective=call.collective)
        opened.around = opened
        opened.is_double = self.open_names[call.name] > 0
        self.open_names[call.name] += 1
        opened.is_counted = (above is None or not above.is_within_counted) and self.is_counted(call)
        opened.is_within_counted = opened.is_counted or (above is not None and above.is_within_counted)
        opened.module = above.module if above is not None else None
        if opened.is_counted:
            sums.counted_calls += 1
            self.found.counted.append((call.start, sums, (call.thread, call.start) in self.again))
        if call.sequence >= 0:
            if call.name.startswith(NODE):
                backward_of = self.module_of.get(call.sequence)
                if backward_of is not None:
                    opened.span = self._span("module", backward_of, "backward")
                    opened.span.calls += 1
                    opened.module, opened.is_backward = backward_of, True
            elif opened.module is not None and not (above is not None and above.is_backward):
                self.module_of[call.sequence] = opened.module
        opened.is_backward = opened.is_backward or (above is not None and above.is_backward)
        return opened

    def _opened_span(self, span: Span, stack: Sequence[_Open]) -> _Open:
        kind = "module" if span.kind == "slice" else span.kind
        name = span.name.removeprefix("nn.Module: ") if span.kind == "module" else span.name or "(model)"
        sums = self._span(kind, name, span.phase)
        sums.calls += 1
        above = stack[-1] if stack else None
        opened = _Open(span.end, span.start, span=sums, is_double=any(each.span is sums for each in stack), collective=span.collective)
        if above is not None:
            opened.around, opened.is_within_counted = above.around, above.is_within_counted
            opened.module, opened.is_backward = above.module, above.is_backward
        if kind == "module":
            opened.module = name
        return opened

    def _span(self, kind: str, name: str, phase: str) -> SpanSums:
        key = kind, name, phase
        sums = self.found.spans.get(key)
        if sums is None:
            sums = self.found.spans[key] = SpanSums(kind, name, phase)
        return sums

    def _close(self, opened: _Open) -> None:
        took = opened.end - opened.start
        opened.around = None  # of an operator that is itself: a cycle, which only the garbage collector would free
        if opened.operator is not None:
            self.open_names[opened.operator.name] -= 1
            opened.operator.host += 0 if opened.is_double else took
            opened.operator.own_host += max(took - opened.children, 0)
        elif opened.span is not None and not opened.is_double:
            opened.span.host += took

    def _launch(self, call: RuntimeCall, stack: Sequence[_Open]) -> None:
        """Give the work of a launch to all that is open."""
        took, kernels = self.nanoseconds[call.correlation], self.kernels[call.correlation]
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
                    innermost.own_device += took
                    innermost.kernels += kernels
            if each.is_counted and each.operator is not None:
                counted = each.operator
                counted.counted_device += took
            if each.span is not None and id(each.span) not in seen:
                seen.add(id(each.span))
                each.span.device += took
                if each.span.kind not in inner_spans:
                    inner_spans.add(each.span.kind)
                    each.span.own_device += took
        if innermost is not None and counted is None:
            innermost.uncounted_device += took
        about = sorted((each.collective for each in stack if each.collective is not None), key=lambda each: each.group_size is None)
        module = stack[-1].module if stack else None
        self.found.launches[call.correlation] = Launch(call, innermost, counted, module, about[0] if about else None)
