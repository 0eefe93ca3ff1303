"""Define the public functions for counting.

`count` counts one pass of a model, and `counting` counts any code, such as a custom loop.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import msgspec
from torch import Tensor, nn

from lflops.attribution.module_tracker import ModuleTracker
from lflops.error_guard import CleanupStack, Guard, unguarded
from lflops.errors import CountError
from lflops.flop_counter.accumulator import CountOptions
from lflops.flop_counter.build_profile import CountedPass, build_profile
from lflops.flop_counter.compiled_regions import CompiledRegions
from lflops.flop_counter.dispatch_mode import OperatorCounter
from lflops.flop_counter.package_functions import unwatch, watch
from lflops.flop_counter.totals import Resolved
from lflops.garbage import gc_paused
from lflops.inputs.arguments import check_module
from lflops.inputs.batch_size import looked_up_tokens, lookups_of
from lflops.inputs.devices import has_tf32
from lflops.inputs.optimizers import parameters_of, settings_of_all
from lflops.inputs.run_info import run_of
from lflops.inputs.tensors import named_arguments, tensors_in
from lflops.model.call import ModelCall
from lflops.model.compile_guard import KeptGraphs, force_eager
from lflops.model.module_tree import ModuleTree
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.records import Phase
from lflops.ranks.collect.topology import check_logical, with_logical
from lflops.torch_private.autograd import watch_derivatives
from lflops.torch_private.dispatch_modes import (
    can_stay_compiled,
    end_mode,
    is_tracing,
    push_mode,
)
from lflops.torch_private.self_check import check
from lflops.torch_private.tensor_constructors import construct_without_modes
from lflops.torch_private.tensors import only_shapes_run, without_overrides

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
    """Run one real pass and count its work by module. Nothing is timed.

    Compiled modules run eagerly for this pass. Afterwards the model's gradients, buffers and
    training mode are restored, and so are the random number generators. The user's hooks run as in
    any pass. For example, a hook that steps an optimizer changes the parameters.

    Args:
        model: The model. It runs in its current mode (training or evaluation), and with the
            caller's grad mode and autocast.
        args: The positional arguments of the model, or a single tensor.
        kwargs: The keyword arguments of the model.
        backward: Whether to run backward from `loss(output)`.
        loss: A function that computes a scalar from the output. By default, the floating-point
            outputs are summed, and the sum is not counted.
        ignore: Names or classes of modules. Their self work (without their submodules) is left out
            of every total. A note in the profile lists these modules.
        logical: The profile of the unsharded model on the same arguments, from `count` or
            `estimate`. It supplies the MACs of the unsharded model that cannot be determined from
            the sharded tensors.

    Raises:
        CountError: An argument is invalid, or lflops does not support this torch.
    """
    check_logical("count: ", logical)
    call = ModelCall.of("count", model, args, kwargs, backward=backward, loss=loss)
    with call.untouched():
        return counted(call, ignore, logical)


def counted(call: ModelCall, ignore: Ignored, logical: Profile | None = None) -> Profile:
    """Run a model call eagerly and return its profile."""
    batch = (call.args, call.kwargs)
    counting = Counting(
        {"": call.model}, phase="forward", ignore=ignore, logical=logical, batch=batch, eager=True
    )
    with counting:
        call.run()
    return counting.profile


def counting(
    *modules: nn.Module, ignore: Ignored = (), logical: Profile | None = None
) -> "Counting":
    """Count everything that runs in a `with` block, such as a loop with backward and optimizer.

    A single module is the root of the profile. Several modules are placed below the root and named
    after their classes.

    Args:
        modules: The models. Their work is listed by module. Other work belongs to the root.
        ignore: As in `count`.
        logical: As in `count`.

    Raises:
        CountError: No module is passed, or an argument is not a module.
    """
    if not modules:
        raise CountError("counting: no module was passed: pass at least one module")
    for module in modules:
        check_module("counting", module)
    check_logical("counting: ", logical)
    return Counting(_named(modules), ignore=ignore, logical=logical)


class Counting:
    """A context manager that counts on this thread, and on other threads that call the modules.

    After the `with` block, `profile` is available. If the block raised an exception, the profile is
    partial.

    Attributes:
        inputs: For each integer input of the model, its name and its sizes and strides (a
            `Lookup`). If an embedding looks up a tensor with the same sizes and strides, the input
            contains the tokens.
    """

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        *,
        phase: Phase = "other",
        ignore: Ignored = (),
        logical: Profile | None = None,
        batch: tuple[tuple[Any, ...], dict[str, Any]] = ((), {}),
        options: CountOptions | None = None,
        tracker: Callable[..., ModuleTracker] = ModuleTracker,
        counter: Callable[[ModuleTracker, CountOptions], OperatorCounter] = OperatorCounter,
        eager: bool = False,
        tf32: bool | None = None,
        guard: Guard = unguarded,
    ) -> None:
        """Prepare a count. The modules are not changed until the `with` block is entered.

        Args:
            roots: The modules to count, keyed by name.
            phase: The phase of work outside all modules until the first module is called.
            ignore: As in `count`.
            logical: As in `count`.
            batch: The positional and keyword arguments of the model; empty if unknown.
            options: The data to collect in addition to MACs and FLOPs.
            tracker: A function that creates the tracker of the running module and phase.
            counter: A function that creates the operator counter.
            eager: Whether compiled code runs eagerly. Pass false for a step of a training run,
                because eager code draws different random numbers and may need more memory.
            tf32: Whether the chip supports TF32. If `None`, the device is queried.
            guard: Keeps errors in lflops from reaching the training run.
        """
        check()
        self._tree = ModuleTree(roots)
        self._ignore = _each(ignore)
        # A wrong name raises an error here, and not only after the pass.
        ignored_modules(self._tree, self._ignore)
        self._logical = logical
        self._batch = batch
        self._scopes = tracker(self._tree, phase=phase, follow=self._start_on_this_thread)
        self._counter = counter(self._scopes, options or CountOptions())
        self._undo = CleanupStack()
        self._guard = guard
        self._entered = False
        self._eager = eager
        self._tf32 = tf32
        self._takes_derivatives = False
        self._graphs = KeptGraphs()
        if not eager:
            self._graphs.start()
        self._profile: Profile | None = None
        self.inputs = lookups_of(named_arguments(*batch))
        self._run = run_of(self._parameters(), *batch)

    def __enter__(self) -> Self:
        if self._entered:
            raise CountError(
                "counting: this object was already used in a `with` block: call lflops.counting "
                "again to create a new one"
            )
        self._entered = True
        tensors = [*self._parameters(), *tensors_in(self._batch)]
        if not self._counter.fake and only_shapes_run(tensors):
            raise CountError(
                "counting: the tensors are fake, so nothing would be counted: create the model on "
                "device='meta', or use lflops.estimate"
            )
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
        watch_derivatives(undo, self._take_derivatives)
        mode = self._counter.mode()
        undo.add(end_mode, mode)
        push_mode(mode)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._undo.close()
        # The following code creates several objects for each operator, which would trigger many
        # garbage collections.
        with gc_paused():
            self._label()
            profile = self._assemble(self._resolve(), partial=kind is not None)
        self._profile = profile
        # Without these references, the model and the batch can be freed before the profile.
        del self._tree
        del self._scopes
        del self._counter
        del self._batch
        failed = []
        for note in profile.notes:
            if note.code == "formula_failed":
                failed.append(f"{note.subject} ({note.values['error']})")
        if failed:
            warnings.warn(
                "count: these operators are not counted, because their formulas failed: "
                f"{', '.join(failed)}",
                stacklevel=3,
            )

    def outside(self, phase: Phase) -> None:
        """Set the phase of work outside all modules.

        The phase changes again with the next forward of a module or the next backward pass.
        """
        self._scopes.outside(phase)

    @property
    def profile(self) -> Profile:
        """The profile, available after the `with` block."""
        if self._profile is None:
            raise CountError(
                "counting: the profile is not available until the `with` block has ended"
            )
        return self._profile

    def so_far(self) -> tuple[int, int]:
        """Return the MACs and FLOPs counted so far in the `with` block."""
        op_counts = self._counter.total().op_counts.values()
        macs = sum(counts.macs for counts in op_counts)
        flops = sum(counts.flops for counts in op_counts)
        return macs, flops

    def stop(self) -> None:
        """Remove all hooks and modes.

        A second call does nothing. Leaving the `with` block afterwards still builds the profile.
        """
        self._undo.close()

    def _take_derivatives(self) -> None:
        """Record that the counted code computes derivatives for further use.

        This method is called before `torch.autograd.grad` and before a backward pass with
        `create_graph`. It ignores passes on threads that are not counted, and passes with which
        torch.compile traces a backward graph.
        """
        if self._scopes.follows_this_thread() and not is_tracing():
            self._takes_derivatives = True

    def _prepare_compiled(self, undo: CleanupStack) -> None:
        """Record the calls of compiled code. If that is impossible, make this code run eagerly."""
        if self._counter.fake or not can_stay_compiled():
            undo.enter(force_eager())
            return
        from lflops.torch_private.dynamo import with_control_flow_compiled

        if self._eager:
            undo.enter(force_eager())
            undo.enter(with_control_flow_compiled())
        else:
            # torch.compile may have been loaded since the count was created.
            self._graphs.start()
        regions = CompiledRegions(self._scopes, self._guard)
        self._counter.regions = regions
        undo.add(regions.stop)
        regions.start()

    def _resolve(self) -> Resolved:
        """Return the counted work, including the work of compiled graphs."""
        totals = self._counter.total()
        regions = self._counter.regions
        if regions is None or not regions.calls:
            return Resolved(totals)
        from lflops.flop_counter.graph_counts import resolve

        return resolve(totals, regions.calls, self._tree, traffic=self._counter.counts_traffic)

    def _start_on_this_thread(self) -> Callable[[], None]:
        return self._counter.start_on_this_thread()

    def _parameters(self) -> Iterator[nn.Parameter]:
        for parameter, _ in self._tree.parameters():
            yield parameter

    def _hold(self) -> None:
        """Record the tensors that exist before the count as live memory.

        These are the parameters, gradients and buffers, the batch, and the storages that an earlier
        step left alive.
        """
        memory = self._counter.memory
        if memory is None:
            return
        for parameter, fqn in self._tree.parameters():
            memory.hold([parameter], "parameters", fqn)
            if parameter.grad is not None:
                memory.hold([parameter.grad], "gradients", fqn)
        for fqn, module in self._tree.modules.items():
            memory.hold(module.buffers(recurse=False), "other", fqn)
        with without_overrides():
            memory.hold(tensors_in(self._batch), "other", "")
        memory.hold_survivors()

    def _label(self) -> None:
        """Set the memory category of gradients and optimizer states, and stop recording memory.

        Gradients can be recognized only after the counted code has run: they are the tensors in
        the attribute `grad` of parameters.
        """
        memory = self._counter.memory
        if memory is None:
            return
        gradients = [each.grad for each in self._parameters() if each.grad is not None]
        memory.relabel(gradients, "gradients")
        memory.relabel(self._counter.optimizer_state(), "optimizer_state")
        memory.stop()

    def _assemble(self, resolved: Resolved, *, partial: bool) -> Profile:
        memory = None
        if resolved.is_memory_known:
            memory = self._counter.memory
        run = msgspec.structs.replace(
            self._run,
            partial=partial,
            takes_derivatives=self._takes_derivatives,
            optimizers=settings_of_all(self._counter.optimizers()),
            optimized_parameters=parameters_of(self._counter.optimizers()),
        )
        collected = CountedPass(
            tree=self._tree,
            calls=self._scopes.calls + resolved.calls,
            totals=resolved.totals,
            memory=None if memory is None else memory.record.memory(),
            peaks={} if memory is None else memory.record.peak_of_rows(),
            # The names of ignored modules are looked up again, because a shared module may have
            # received more names during the pass.
            ignored=ignored_modules(self._tree, self._ignore),
            notes=(*self._notes(), *resolved.notes),
        )
        tf32 = has_tf32(run.device_type) if self._tf32 is None else self._tf32
        profile = self._with_tokens(build_profile(collected, run, tf32=tf32))
        if self._logical is None:
            return profile
        return with_logical(profile, self._logical)

    def _with_tokens(self, profile: Profile) -> Profile:
        """Return the profile with the number of tokens per step, if embeddings show this number.

        If the number is already known from the names of the inputs, or if no embedding was called,
        return the profile unchanged.
        """
        if profile.run.tokens_per_step is not None or not self._counter.lookups:
            return profile
        lookups = self._counter.lookups
        size = looked_up_tokens(self.inputs, lookups, self._positions(profile))
        run = msgspec.structs.replace(
            profile.run, tokens_per_step=size.tokens, tokens_from=size.tokens_from
        )
        return msgspec.structs.replace(profile, run=run)

    def _positions(self, profile: Profile) -> Iterator[int]:
        """Yield, for each layer with weight matrices, the number of positions in one call.

        A position is one row of the layer's input, such as one token. Each position needs one MAC
        per element of the weight matrices, so the number follows from the layer's MACs.
        """
        for fqn, module in self._tree.modules.items():
            row = profile.modules[fqn]
            matrices = 0
            for parameter in module.parameters(recurse=False):
                if parameter.dim() > 1:
                    matrices += parameter.numel()
            if matrices and row.calls:
                yield row.forward.self_macs // (matrices * row.calls)

    def _notes(self) -> Iterable[Note]:
        ambiguous = self._scopes.ambiguous
        if ambiguous:
            yield Note(code="ambiguous_threads", subject="", values={"calls": ambiguous})
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
        name = kind if seen[kind] == 1 else f"{kind}-{seen[kind]}"
        roots[name] = module
    return roots


def _each(ignore: Ignored) -> list[Any]:
    if isinstance(ignore, str | nn.Module) or not isinstance(ignore, Iterable):
        return [ignore]
    return list(ignore)


def ignored_modules(tree: ModuleTree, ignore: Ignored) -> frozenset[str]:
    """Return the names of the modules that `ignore` refers to by name or by class.

    Raises:
        CountError: An entry is neither a module's name nor a module class.
    """
    fqns: set[str] = set()
    for each in _each(ignore):
        if isinstance(each, str):
            if each not in tree.modules:
                raise CountError(
                    f"ignore: the model has no module {each!r}: pass a name from "
                    "model.named_modules()"
                )
            fqns.add(each)
        elif isinstance(each, type) and issubclass(each, nn.Module):
            fqns.update(fqn for fqn, module in tree.modules.items() if isinstance(module, each))
        else:
            raise CountError(
                f"ignore: {each!r} is neither a module's name nor a module class: pass names or "
                "classes of modules"
            )
    return frozenset(fqns)
