"""Counting that users call: `count` for one pass, and `counting` around their own loop."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import msgspec
from torch import Tensor, nn

from lflops.boundary import Guard, Undo, unguarded
from lflops.collect.attribution.module_tracker import ModuleTracker
from lflops.collect.counting.accumulator import Extent
from lflops.collect.counting.build_profile import CountedPass, build_profile
from lflops.collect.counting.compiled_regions import CompiledRegions
from lflops.collect.counting.dispatch_mode import OperatorCounter
from lflops.collect.counting.package_functions import unwatch, watch
from lflops.collect.counting.totals import Resolved
from lflops.collect.inputs.arguments import check_module
from lflops.collect.inputs.devices import has_tf32
from lflops.collect.inputs.run_info import run_of
from lflops.collect.inputs.tensors import tensors_in
from lflops.collect.model.call import ModelCall
from lflops.collect.model.compile_guard import KeptGraphs, force_eager
from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.ranks.topology import check_logical, with_logical
from lflops.collect.torch_private.dispatch_modes import end_mode, passes_dynamo, push_mode
from lflops.collect.torch_private.self_check import check
from lflops.collect.torch_private.tensor_constructors import construct_without_modes
from lflops.collect.torch_private.tensors import only_shapes_run, without_overrides
from lflops.errors import CountError
from lflops.garbage import gc_paused
from lflops.profile.model import Profile
from lflops.profile.notes import Note
from lflops.profile.records import Phase

Ignored = Iterable[str | type[nn.Module]]


def count(
    model: nn.Module,
    args: tuple[Any, ...] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backward: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    ignore: Ignored = (),
    logical: Profile | None = None,
) -> Profile:
    """Run one real pass and count the work in it, module by module; nothing is timed.

    Compiled modules run eagerly for this pass. Afterwards the model's gradients, buffers, mode and the random numbers are what they were.
    Hooks of the user's run as in any pass: one that steps an optimizer steps it.

    Args:
        model: In the training mode to count; the caller's grad mode and autocast apply.
        args: Its positional arguments; a lone tensor stands for itself.
        kwargs: Its keyword arguments.
        backward: Whether to go backward from `loss(output)`.
        loss: Output to a scalar; without it, the sum of the floating outputs, which itself is not counted.
        ignore: Names or classes of modules whose own work is left out of every total, and listed as left out.
        logical: The profile of the unsharded model on the same arguments, by `count` or `estimate`. It gives the logical MACs where the
            sharded tensors do not.

    Raises:
        CountError: An argument is wrong, or this torch is not one that lflops knows.
    """
    check_logical("count: ", logical)
    call = ModelCall.of("count", model, args, kwargs, backward=backward, loss=loss)
    with call.untouched():
        return counted(call, ignore, logical)


def counted(call: ModelCall, ignore: Ignored, logical: Profile | None = None) -> Profile:
    batch = (call.args, call.kwargs)
    counting = Counting({"": call.model}, phase="forward", ignore=ignore, logical=logical, batch=batch, eager=True)
    with counting:
        call.run()
    return counting.profile


def counting(*modules: nn.Module, ignore: Ignored = (), logical: Profile | None = None) -> "Counting":
    """Count all that runs inside of a `with`: your own loop, with its loss, backward and optimizer.

    One module is the root of the profile; of several each is a row below the root, named by its class.

    Args:
        modules: The models whose modules get rows. Work outside of them is the root's own.
        ignore: As in `count`.
        logical: As in `count`.

    Raises:
        CountError: There is no module, or one of them is none.
    """
    if not modules:
        raise CountError("counting: give at least one module")
    for module in modules:
        check_module("counting", module)
    check_logical("counting: ", logical)
    return Counting(_named(modules), ignore=ignore, logical=logical)


class Counting:
    """A count in progress, on this thread and others that enter its modules. `profile` is there at its end; partial after an exception."""

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        *,
        phase: Phase = "other",
        ignore: Ignored = (),
        logical: Profile | None = None,
        batch: tuple[tuple[Any, ...], dict[str, Any]] = ((), {}),
        extent: Extent | None = None,
        tracker: Callable[..., ModuleTracker] = ModuleTracker,
        counter: Callable[[ModuleTracker, Extent], OperatorCounter] = OperatorCounter,
        eager: bool = False,
        tf32: bool | None = None,
        guard: Guard = unguarded,
    ) -> None:
        """Name the modules; nothing of theirs is touched until the `with` is entered.

        With `eager`, compiled code runs eagerly meanwhile. No training may depend on such a pass: it has other random numbers, and may need
        more memory. `tf32` says whether the chip has TF32; without it the device is asked. `guard` keeps our errors from the training.
        """
        check()
        self._tree = ModuleTree(roots)
        self._ignore = _each(ignore)
        ignored_rows(self._tree, self._ignore)  # a wrong name is an error now, not after the pass
        self._logical = logical
        self._batch = batch
        self._scopes = tracker(self._tree, phase=phase, follow=self._follow)
        self._counter = counter(self._scopes, extent or Extent())
        self._undo = Undo()
        self._guard = guard
        self._entered = False
        self._eager, self._tf32 = eager, tf32
        self._graphs = KeptGraphs()
        if not eager:
            self._graphs.start()
        self._profile: Profile | None = None
        self._run = run_of((each for each, _ in self._tree.parameters()), *batch)

    def __enter__(self) -> Self:
        if self._entered:
            raise CountError("counting: this count was entered before, and counts once: make another")
        self._entered = True
        if not self._counter.fake and only_shapes_run([*(each for each, _ in self._tree.parameters()), *tensors_in(self._batch)]):
            raise CountError("counting: tensors are fake here, and nothing would be counted: use device='meta', or lflops.estimate")
        try:
            self._begin()
        except BaseException:
            self._undo.close()
            raise
        return self

    def _begin(self) -> None:
        undo = self._undo
        undo.add(self._graphs.stop)
        self._prepare_compiled(undo)
        undo.add(unwatch, self)
        watch(self)
        if not self._counter.fake:
            construct_without_modes(undo)
        self._hold()
        undo.add(self._scopes.stop)
        self._scopes.start(self._guard)
        self._counter.guard = self._guard
        mode = self._counter.mode()
        undo.add(end_mode, mode)
        push_mode(mode)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._undo.close()
        with gc_paused():  # several objects for each operator
            self._label()
            self._profile = self._assemble(self._resolve(), partial=kind is not None)
        del self._tree, self._scopes, self._counter, self._batch  # what was counted may be freed while the profile is read
        failed = [f"{note.subject} ({note.values['error']})" for note in self._profile.notes if note.code == "formula_failed"]
        if failed:
            warnings.warn(f"count: the formula failed, so no call is counted: {', '.join(failed)}", stacklevel=3)

    def outside(self, phase: Phase) -> None:
        """Say what work outside of every module is from now on; a module's forward and any backward change that."""
        self._scopes.outside(phase)

    @property
    def profile(self) -> Profile:
        """What was counted; there once the `with` is left."""
        if self._profile is None:
            raise CountError("counting: the profile is there when the `with` is left")
        return self._profile

    def so_far(self) -> tuple[int, int]:
        """MACs and FLOPs up to here, while the `with` is running."""
        cells = self._counter.total().cells.values()
        return sum(counts.macs for counts in cells), sum(counts.flops for counts in cells)

    def stop(self) -> None:
        """Take everything off. It can be called again, and then with what was counted there is a profile."""
        self._undo.close()

    def _prepare_compiled(self, undo: Undo) -> None:
        """Let compiled code run as it does, and write its calls down; or let it run eagerly."""
        if self._counter.fake or not passes_dynamo():
            undo.enter(force_eager())
            return
        from lflops.collect.torch_private.dynamo import with_control_flow_compiled

        if self._eager:
            undo.enter(force_eager())
            undo.enter(with_control_flow_compiled())
        else:  # of what eager control flow calls, the graph is what runs
            self._graphs.start()
        self._counter.regions = regions = CompiledRegions(self._scopes, self._guard)
        undo.add(regions.stop)
        regions.start()

    def _resolve(self) -> Resolved:
        """The sums, with what compiled code did."""
        totals, regions = self._counter.total(), self._counter.regions
        if regions is None or not regions.calls:
            return Resolved(totals)
        from lflops.collect.counting.graph_counts import resolve

        return resolve(totals, regions.calls, self._tree, traffic=self._counter.counts_traffic)

    def _follow(self) -> Callable[[], None]:
        return self._counter.follow()

    def _hold(self) -> None:
        memory = self._counter.memory
        if memory is None:
            return
        for parameter, row in self._tree.parameters():
            memory.hold([parameter], "parameters", row)
            memory.hold([parameter.grad] if parameter.grad is not None else [], "gradients", row)
        for row, module in self._tree.modules.items():
            memory.hold(module.buffers(recurse=False), "other", row)
        with without_overrides():
            memory.hold(tensors_in(self._batch), "other", "")
        memory.hold_survivors()

    def _label(self) -> None:
        memory = self._counter.memory
        if memory is not None:
            memory.relabel((each.grad for each, _ in self._tree.parameters() if each.grad is not None), "gradients")
            memory.relabel(self._counter.optimizer_state(), "optimizer_state")
            memory.stop()

    def _assemble(self, resolved: Resolved, *, partial: bool) -> Profile:
        memory = self._counter.memory if resolved.is_memory_known else None
        run = msgspec.structs.replace(self._run, partial=True) if partial else self._run
        collected = CountedPass(
            tree=self._tree,
            calls=self._scopes.calls + resolved.calls,
            totals=resolved.totals,
            memory=None if memory is None else memory.result(),
            peaks={} if memory is None else memory.peak_of_rows(),
            ignored=ignored_rows(self._tree, self._ignore),  # a shared module has more rows by now
            notes=(*self._notes(), *resolved.notes),
        )
        profile = build_profile(collected, run, tf32=has_tf32(run.device_type) if self._tf32 is None else self._tf32)
        return profile if self._logical is None else with_logical(profile, self._logical)

    def _notes(self) -> Iterable[Note]:
        if self._scopes.ambiguous:
            yield Note(code="ambiguous_threads", subject="", values={"calls": self._scopes.ambiguous})
        if self._tree.compiled and (self._eager or self._counter.regions is None):
            yield Note(code="compiled_ran_eager", subject=str(len(self._tree.compiled)), values={})


def _named(modules: tuple[nn.Module, ...]) -> dict[str, nn.Module]:
    if len(modules) == 1:
        return {"": modules[0]}
    roots: dict[str, nn.Module] = {}
    seen: Counter[str] = Counter()
    for module in modules:
        kind = type(module).__name__
        seen[kind] += 1
        roots[kind if seen[kind] == 1 else f"{kind}-{seen[kind]}"] = module
    return roots


def _each(ignore: Ignored) -> list[Any]:
    return [ignore] if isinstance(ignore, str | nn.Module) or not isinstance(ignore, Iterable) else list(ignore)


def ignored_rows(tree: ModuleTree, ignore: Ignored) -> frozenset[str]:
    """The rows that the names and classes of `ignore` mean; a `CountError` where one is no name of a module, and no class."""
    rows: set[str] = set()
    for each in _each(ignore):
        if isinstance(each, str):
            found = {each} & tree.modules.keys()
        elif isinstance(each, type) and issubclass(each, nn.Module):
            found = {row for row, module in tree.modules.items() if isinstance(module, each)}
        else:
            raise CountError(f"ignore: {each!r} is neither a module's name nor a module class")
        if not found and isinstance(each, str):
            raise CountError(f"ignore: there is no module {each!r}; the names are those of model.named_modules()")
        rows |= found
    return frozenset(rows)
