"""Attribute device work to the operator, the modules and the scopes that launched it.

    host     scope [ aten::linear [ aten::addmm [ cudaLaunchKernel ] ] ]
    device                                          kernel     self time of addmm, inclusive time of
                                                               linear and of the scope

Device work is a kernel, copy or fill. A host item is anything that the trace records on the host: a
span (a module, scope or step), an operator or a call of the device's runtime. A host item is inside
another host item if both are on the same thread, and it runs while the other item runs. A kernel
has the same number, `correlation`, as the runtime call that launched it.

A call of an operator is *counted* if its FLOPs are known and it is not inside another counted call.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from lflops.errors import ProfileError
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

MOST_NESTED = 1_000
"""Maximum number of operators, modules and scopes that may be nested in each other on one thread.

Python itself nests no more calls. Without this limit, a malformed trace could make the analysis
very slow, because it looks at everything around each launch.
"""

_OperatorKey = tuple[str, Inputs | None]


@dataclass(slots=True)
class OperatorSums(SliceTimes):
    """Totals of the calls of one operator whose inputs have the same shapes, dtypes and values.

    A call is counted if its FLOPs are known and it is not inside another counted call.

    Attributes:
        inputs: The inputs, or `None` if shapes were not recorded.
        counted_calls: Number of counted calls.
        counted_device: Time of the device work that was launched inside the counted calls.
        unsupported_device: Time of the device work that the operator launched itself in calls that
            are neither counted nor inside a counted call. The FLOPs of this work are unknown.
        has_operators: Whether the operator called another operator.
        has_tf32: Whether the counted calls launched a kernel with TF32 in its name. The inputs only
            show fp32.
    """

    inputs: Inputs | None = None
    counted_calls: int = 0
    counted_device: int = 0
    unsupported_device: int = 0
    has_operators: bool = False
    has_tf32: bool = False


@dataclass(slots=True)
class SpanSums(SliceTimes):
    """Totals of all calls of one module, or of all uses of one scope, in one phase."""

    kind: str = "scope"
    phase: str = "forward"


class Launch(NamedTuple):
    """The launch of a kernel, copy or fill. A field is `None` if it is unknown or does not exist.

    Attributes:
        call: The call of the device's runtime that launched the work.
        operator: The innermost operator around `call`.
        counted: The operator around `call` for which FLOPs are counted.
        collective: The collective around `call`.
    """

    call: RuntimeCall | None = None
    operator: OperatorSums | None = None
    counted: OperatorSums | None = None
    collective: Collective | None = None


NOT_RECORDED = Launch()


class CountedCall(NamedTuple):
    """An operator call whose FLOPs are counted.

    Attributes:
        start: Start of the call in nanoseconds.
        operator: Totals of the operator.
        is_recompute: Whether activation checkpointing made this call, to recompute forward.
    """

    start: int
    operator: OperatorSums
    is_recompute: bool


@dataclass(slots=True)
class HostWalk:
    """Totals of operators, modules and scopes, and the launches of the device work.

    Attributes:
        operators: Totals of operators, keyed by name and inputs.
        spans: Totals of modules and scopes, keyed by kind, name and phase.
        launches: The launch of each kernel, copy and fill, keyed by `DeviceEvent.correlation`.
        counted: The operator calls whose FLOPs are counted.
        by_external: Launches for which only the operator is known, because the trace does not
            contain the runtime call; keyed by `DeviceEvent.external`.
    """

    operators: dict[_OperatorKey, OperatorSums] = field(default_factory=dict)
    spans: dict[tuple[str, str, str], SpanSums] = field(default_factory=dict)
    launches: dict[int, Launch] = field(default_factory=dict)
    counted: list[CountedCall] = field(default_factory=list)
    by_external: dict[int, Launch] = field(default_factory=dict)

    def launch(self, work: DeviceEvent) -> Launch:
        """Return the launch of device work, or `NOT_RECORDED` if the trace does not show it."""
        found = self.launches.get(work.correlation)
        if found is not None:
            return found
        return self.by_external.get(work.external, NOT_RECORDED)

    def call(self, work: DeviceEvent) -> RuntimeCall | None:
        """Return the runtime call that launched device work, or `None` if it is unknown."""
        return self.launch(work).call


@dataclass(slots=True)
class _Open:
    """An operator, module, scope or step (an item) that `walk` has entered but not left.

    Attributes:
        operator: The innermost operator, which can be this item.
        operator_end: End time of that operator.
        is_within_counted: Whether this item or an item around it is a counted operator.
        is_backward: Whether this item is inside a backward node for which the module that created
            it in forward is known.
        module: The innermost module. In backward, the module that created the node in forward.
        node: The outermost backward node around this item, which can be this item.
        again: The outermost operator inside `node` for which autograd builds a node. Autograd
            usually does so only in forward, so the operator might recompute forward.
        span: Totals of this item, if it is a module or scope.
        is_counted: Whether this item is a counted operator.
    """

    start: int
    end: int
    collective: Collective | None = None
    operator: OperatorSums | None = None
    operator_end: int = 0
    is_within_counted: bool = False
    is_backward: bool = False
    module: str | None = None
    node: OperatorCall | None = None
    again: OperatorCall | None = None
    span: SpanSums | None = None
    is_counted: bool = False

    def inherit(self, around: "_Open") -> None:
        """Copy the values of the enclosing item `around` that also apply to this item."""
        self.operator = around.operator
        self.operator_end = around.operator_end
        self.is_within_counted = around.is_within_counted
        self.is_backward = around.is_backward
        self.module = around.module
        self.node = around.node
        self.again = around.again


def walk(
    trace: RecordedTrace, work: Iterable[DeviceEvent], is_counted: Callable[[OperatorCall], bool]
) -> HostWalk:
    """Attribute device work to the operators, modules and scopes that launched it.

    Args:
        trace: The trace.
        work: The device work to attribute.
        is_counted: Function that returns whether the FLOPs of an operator call are known. They
            include the FLOPs of the operators inside the call, so these operators are not counted
            again.
    """
    found = HostWalk()
    nanoseconds = summed((each.correlation, each.duration) for each in work)
    walker = _Walker(found, nanoseconds, is_counted)
    for items in _items_by_thread(trace, nanoseconds):
        walker.walk_thread(items)
    found.counted = walker.counted_calls()
    operators = {call.external: call for call in trace.operators if call.external}
    for each in work:
        launch = found.launches.get(each.correlation, NOT_RECORDED)
        if launch.counted is not None and precision_by_name(each.name) == "tf32":
            launch.counted.has_tf32 = True
        if launch is NOT_RECORDED and each.external in operators:
            walker.add_without_launch(each, operators[each.external])
    return found


def _items_by_thread(
    trace: RecordedTrace, launching: Mapping[int, int]
) -> Iterator[Sequence[HostItem]]:
    """Yield the modules, scopes, steps, operators and launches of each thread.

    Threads with modules come first, because backward on other threads is assigned to these modules.
    `launching` has the `correlation` of each runtime call that launched device work.
    """
    threads_of_slices = _slice_threads(trace)
    calls = (call for call in trace.runtime if call.correlation in launching)
    items: Iterator[HostItem] = chain(trace.spans, trace.operators, calls)
    by_thread = grouped(items, lambda item: threads_of_slices.get(item.thread, item.thread))
    with_spans = {span.thread for span in trace.spans}
    for thread in sorted(by_thread, key=lambda thread: (thread not in with_spans, thread)):
        yield by_thread[thread]


def _slice_threads(trace: RecordedTrace) -> dict[int, int]:
    """Return the thread of each track of module slices.

    lflops adds module slices to a trace: events that show when modules run. They are on separate
    tracks, so their threads are not known. A track belongs to the thread of the backward nodes that
    begin at the same time as its slices. If there are no such nodes, the track belongs to the
    thread that runs the steps.
    """
    nodes = {}
    for call in trace.operators:
        if call.name.startswith(NODE):
            nodes[call.start] = call.thread
    slices = []
    steps: Counter[int] = Counter()
    for span in trace.spans:
        if span.kind == "slice":
            slices.append((span.thread, span.start))
        elif span.kind == "step":
            steps[span.thread] += 1
    threads = {}
    if steps:
        thread_of_steps, _ = steps.most_common(1)[0]
        for track, _ in slices:
            threads[track] = thread_of_steps
    return threads | threads_of_tracks(slices, nodes)


class _Counted(NamedTuple):
    """A counted call of an operator, with the values that show whether it recomputes forward.

    Attributes:
        call: The call.
        operator: Totals of the operator.
        node: The outermost backward node around the call, or `None`.
        again: The outermost operator inside `node` for which autograd builds a node, or `None`.
    """

    call: OperatorCall
    operator: OperatorSums
    node: OperatorCall | None
    again: OperatorCall | None


class _Walker:
    """Attributes the device work of each thread, and adds the results to a `HostWalk`."""

    def __init__(
        self,
        found: HostWalk,
        nanoseconds: Mapping[int, int],
        is_counted: Callable[[OperatorCall], bool],
    ) -> None:
        """Prepare to attribute device work.

        Args:
            found: The result to fill.
            nanoseconds: Time of the device work that each runtime call launched, keyed by
                `correlation`.
            is_counted: Function that returns whether the FLOPs of an operator call are known.
        """
        self._found = found
        self._nanoseconds = nanoseconds
        self._is_counted = is_counted
        # The module of each forward operator, by sequence number.
        self._module_of: dict[int, str] = {}
        self._counted: list[_Counted] = []
        # The outermost backward nodes by sequence number, and the forward operators outside nodes.
        self._nodes: defaultdict[int, list[OperatorCall]] = defaultdict(list)
        self._forward: list[OperatorCall] = []

    def walk_thread(self, items: Iterable[HostItem]) -> None:
        """Add the operators, spans and launches of one thread to the results.

        Raises:
            ProfileError: More than `MOST_NESTED` items overlap.
        """
        opened: list[_Open] = []
        for item in outer_first(items, opened):
            if len(opened) > MOST_NESTED:
                # `outer_first` removes an ended item only from the top of the stack. If each item
                # ends shortly after the next item begins, the stack also has ended items below the
                # top.
                opened[:] = [each for each in opened if each.end > item.start]
            if len(opened) > MOST_NESTED:
                raise ProfileError(f"more than {MOST_NESTED:,} events of one thread overlap")
            if isinstance(item, RuntimeCall):
                self._add_launch(item, opened)
                continue
            inside = _Open(item.start, item.end, item.collective)
            if opened:
                inside.inherit(opened[-1])
            if isinstance(item, Span):
                self._add_span(item, inside, opened)
            else:
                self._add_operator(item, inside, opened)
            opened.append(inside)

    def counted_calls(self) -> list[CountedCall]:
        """Return the operator calls with counted FLOPs, from all threads."""
        thread_numbers = self._thread_numbers()
        found = []
        for each in self._counted:
            is_recompute = self._is_recompute(each, thread_numbers)
            found.append(CountedCall(each.call.start, each.operator, is_recompute))
        return found

    def _thread_numbers(self) -> dict[int, int]:
        """Return torch's ID of each thread, keyed by the number of the thread in this trace.

        A trace file contains torch's IDs only in backward nodes: a node has the ID of the thread
        that ran its forward operator. So forward operators are matched with nodes.
        """
        votes: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for call in self._forward:
            for node in self._nodes.get(call.sequence, ()):
                votes[call.thread][node.forward_thread] += 1
        thread_numbers = {}
        for thread, numbers in votes.items():
            thread_numbers[thread], _ = numbers.most_common(1)[0]
        return thread_numbers

    def _is_recompute(self, counted: _Counted, thread_numbers: Mapping[int, int]) -> bool:
        """Return whether a call inside a backward node recomputes forward for checkpointing.

        If autograd builds a node for an operator that runs inside a backward node, there are two
        possible reasons: checkpointing recomputes forward, or backward itself is differentiated
        (`create_graph`). In the first case, the new node runs before the surrounding node ends. In
        the second case, it runs after the surrounding node has ended. An operator and its node have
        the same sequence number, but each thread has its own sequence numbers.
        """
        node = counted.node
        again = counted.again
        if node is None or again is None:
            return False
        for later in self._nodes.get(again.sequence, ()):
            if later.start < node.end:
                continue
            if again.thread in thread_numbers:
                is_its_node = later.forward_thread == thread_numbers[again.thread]
            else:
                is_its_node = later.forward_thread not in thread_numbers.values()
            if is_its_node:
                return False
        return True

    def add_without_launch(self, work: DeviceEvent, call: OperatorCall) -> None:
        """Add device work to its operator if the trace lacks the runtime call that launched it.

        `DeviceEvent.external` identifies the operator.
        """
        sums = self._operator_sums(call)
        sums.device += work.duration
        sums.self_device += work.duration
        sums.unsupported_device += work.duration
        self._found.by_external[work.external] = Launch(operator=sums)

    def _operator_sums(self, call: OperatorCall) -> OperatorSums:
        key = call.name, call.inputs
        sums = self._found.operators.get(key)
        if sums is None:
            sums = OperatorSums(call.name, inputs=call.inputs)
            self._found.operators[key] = sums
        return sums

    def _span_sums(self, kind: str, name: str, phase: str) -> SpanSums:
        key = kind, name, phase
        sums = self._found.spans.get(key)
        if sums is None:
            sums = SpanSums(name, kind=kind, phase=phase)
            self._found.spans[key] = sums
        return sums

    def _add_operator(self, call: OperatorCall, inside: _Open, opened: Sequence[_Open]) -> None:
        sums = self._operator_sums(call)
        sums.calls += 1
        sums.self_host += call.duration
        if not _is_open(call.name, opened):
            sums.host += call.duration
        around = inside.operator
        if around is not None:
            around.has_operators = True
            around.self_host -= min(call.end, inside.operator_end) - call.start
        inside.operator = sums
        inside.operator_end = call.end
        is_node = call.name.startswith(NODE)
        self._find_node(call, inside, is_node=is_node)
        if not inside.is_within_counted and self._is_counted(call):
            inside.is_counted = True
            inside.is_within_counted = True
            sums.counted_calls += 1
            self._counted.append(_Counted(call, sums, inside.node, inside.again))
        if is_node:
            self._enter_backward(call, inside)
        elif call.sequence >= 0 and inside.module is not None and not inside.is_backward:
            self._module_of[call.sequence] = inside.module

    def _enter_backward(self, node: OperatorCall, inside: _Open) -> None:
        """Attribute a backward node to the module that created it in forward, if this is known."""
        module = self._module_of.get(node.sequence)
        if module is not None:
            inside.span = self._span_sums("module", module, "backward")
            inside.span.calls += 1
            inside.module = module
            inside.is_backward = True

    def _find_node(self, call: OperatorCall, inside: _Open, *, is_node: bool) -> None:
        """Set the fields `node` and `again` of `inside`, which `_Open` describes."""
        if inside.node is None or inside.node.end <= call.start:
            inside.node = call if is_node else None
            inside.again = None
            if is_node:
                self._nodes[call.sequence].append(call)
            elif call.sequence >= 0:
                self._forward.append(call)
        elif inside.again is None or inside.again.end <= call.start:
            has_own_sequence = call.sequence not in {-1, inside.node.sequence}
            is_forward = not is_node and has_own_sequence and not call.forward_thread
            inside.again = call if is_forward else None

    def _add_span(self, span: Span, inside: _Open, opened: Sequence[_Open]) -> None:
        kind = "module" if span.kind == "slice" else span.kind
        if span.kind == "module":
            name = span.name.removeprefix("nn.Module: ")
        else:
            name = span.name or "(model)"
        inside.span = self._span_sums(kind, name, span.phase)
        inside.span.calls += 1
        if not any(each.span is inside.span for each in opened):
            inside.span.host += span.duration
        if kind == "module":
            inside.module = name

    def _add_launch(self, call: RuntimeCall, opened: Sequence[_Open]) -> None:
        """Add the device time of a launch to every operator, module and scope around the launch.

        If a recursive operator, module or scope occurs more than once around the launch, the time
        is added to it only once.
        """
        took = self._nanoseconds[call.correlation]
        innermost: OperatorSums | None = None
        counted: OperatorSums | None = None
        collective: Collective | None = None
        operators: set[str] = set()
        spans: set[int] = set()
        span_kinds: set[str] = set()
        for each in reversed(opened):
            operator = each.operator
            if operator is not None and operator.name not in operators:
                operators.add(operator.name)
                operator.device += took
                if innermost is None:
                    innermost = operator
                    innermost.self_device += took
            if each.is_counted and operator is not None:
                counted = operator
                counted.counted_device += took
            span = each.span
            if span is not None and id(span) not in spans:
                spans.add(id(span))
                span.device += took
                if span.kind not in span_kinds:
                    span_kinds.add(span.kind)
                    span.self_device += took
            collective = _better_described(each.collective, collective)
        if innermost is not None and counted is None:
            innermost.unsupported_device += took
        self._found.launches[call.correlation] = Launch(call, innermost, counted, collective)


def _is_open(operator: str, opened: Sequence[_Open]) -> bool:
    return any(each.operator is not None and each.operator.name == operator for each in opened)


def _better_described(outer: Collective | None, inner: Collective | None) -> Collective | None:
    """Return the more complete of two descriptions of the same collective.

    This is the outer description, unless only the inner description has a group size.
    """
    if outer is None:
        return inner
    if inner is not None and inner.group_size is not None and outer.group_size is None:
        return inner
    return outer
