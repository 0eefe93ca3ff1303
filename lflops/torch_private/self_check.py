"""Test each private name of torch that lflops uses on a case with a known result.

If a new version of torch has changed a name, counting fails with an error instead of returning
wrong numbers.
"""

import functools
import io
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd import backward, grad
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lflops.error_guard import CleanupStack
from lflops.torch_private import (
    autograd,
    cuda_memory,
    dispatch_modes,
    distributed,
    modules,
    operators,
    tensor_constructors,
    tensors,
)
from lflops.torch_private.known_torch import differs, known_torch

aten = torch.ops.aten


@functools.cache
def check() -> None:
    """Check once per process that torch's private names do what lflops expects."""
    with known_torch(), dispatch_modes.isolated():
        facts = _numbering() | _of_operators() | _of_tensors() | _of_modules()
    _raise_if_wrong(facts)


@functools.cache
def check_fake_tensors() -> None:
    """Check the private names for fake tensors, which load a large part of torch.

    Only an estimate needs these names.
    """
    check()
    with known_torch(), dispatch_modes.without_modes(), tensors.fake_mode():
        fake = torch.zeros(2, 2, device="cpu")
        only_shapes = tensors.only_shapes_run(()) and len(dispatch_modes.open_modes()) == 1
        try:
            has_values = isinstance(fake[0, 0].item(), float)
        except tensors.NEEDS_VALUES:
            has_values = False
    device = tensors.fake_device(fake)  # type: ignore[arg-type]
    _raise_if_wrong(
        {
            "FakeTensorMode creates no fake tensors": type(fake) is tensors.FakeTensor,
            "a fake tensor has no device": device.type == "cpu",
            "the active dispatch modes are unknown": only_shapes,
            "the value of a fake tensor can be read": not has_values,
        }
    )


@functools.cache
def check_fake_group() -> None:
    """Check the process group with ranks that do not exist (`fake_group`).

    No other process group may exist during the check. Only estimates for several ranks need this
    check.
    """
    with known_torch(), dispatch_modes.without_modes(), distributed.fake_group(2):
        ranks = torch.distributed.get_world_size()
        gathered = [torch.zeros(3, device="cpu") for _ in range(2)]
        torch.distributed.all_gather(gathered, torch.ones(3, device="cpu"))
        receives = _Operators()
        with receives:
            torch.distributed.recv(torch.zeros(3, device="cpu"), src=1)
        is_inferred = _is_sharding_inferred()
    is_wait_named = distributed.wait_operator().name().endswith("wait_tensor")
    is_receive_seen = distributed.receive_operator() in receives.seen
    is_vote = distributed.is_pipeline_vote()
    _raise_if_wrong(
        {
            "a fake process group has the wrong number of ranks": ranks == 2,
            "the operator that waits for collectives has an unexpected name": is_wait_named,
            "receiving a tensor does not dispatch the expected operator": is_receive_seen,
            "every received tensor is treated as a message between pipeline stages": not is_vote,
            "calls with which DTensor infers shapes are not recognized as such": is_inferred,
            "a fake process group is not destroyed": not torch.distributed.is_initialized(),
        }
    )


def _is_sharding_inferred() -> bool:
    """Return whether `infers_sharding` distinguishes two kinds of operator calls by DTensor.

    It must return true during calls that only infer the shape of a result, and false during the
    real call.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    is_inferring: list[bool] = []

    class Watching(dispatch_modes.TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if DTensor in types:
                return NotImplemented
            is_inferring.append(distributed.infers_sharding())
            return function(*args, **(kwargs or {}))

    mesh = init_device_mesh("cpu", (2,))
    sharded = DTensor.from_local(torch.ones(1, 3, device="cpu"), mesh, [Shard(0)])
    with Watching():  # type: ignore[no-untyped-call]
        sharded.cos()
    # The last call is the real one. There may be no call before it, because DTensor infers each
    # shape only once in a process.
    *before, last = is_inferring
    return all(before) and not last


@functools.cache
def check_inductor() -> None:
    """Check the private names for inductor, which takes seconds to load.

    Only a monitor that attributes the time of compiled code to modules needs these names.
    """
    from lflops.torch_private import inductor

    with known_torch():
        before = inductor.is_recording()
        restore = inductor.record_graphs()
        during = inductor.is_recording()
        restore()
        names = inductor.recorded_names(
            '{"cppCodeToPost": {"extern_kernels.mm:1": ["mm"]}, "lflops": {"modules": []}}'
        )
    are_nodes_known = names == ({"extern_kernels.mm:1": ["mm"]}, {"modules": []})
    calls = inductor.kernel_calls("    # [Provenance debug handles] cpp_fused_add_0:12\n")
    keys_have_graphs = inductor.keys_have_graphs()
    _raise_if_wrong(
        {
            "compiled graphs are not recorded": during and not before,
            "Inductor's settings are not restored": not inductor.is_recording(),
            "compiled kernels are called without a call number": calls == ("cpp_fused_add_0:12",),
            "the graph nodes of compiled kernels are unknown": are_nodes_known,
            "compiled graphs cannot be listed": not list(inductor.compiled_graphs(())),
            "cache keys of compiled graphs cannot contain module names": keys_have_graphs,
        }
    )


@functools.cache
def check_data_loader() -> None:
    """Check, with an empty data set, that `wrap_fetches` reports each fetch of a batch.

    Only an auto-detected loop needs this check.
    """
    from lflops.torch_private.data_loader import wrap_fetches

    reported: list[object] = []
    loader: torch.utils.data.DataLoader[torch.Tensor] = torch.utils.data.DataLoader(
        torch.empty(0, device="cpu"),  # type: ignore[arg-type]
        generator=torch.Generator("cpu"),
    )
    iterator = iter(loader)
    with known_torch(), CleanupStack() as undo:
        # The exception itself would keep this frame and all its callers alive.
        wrap_fetches(undo, reported.append, lambda *got: reported.append(type(got[-1])))
        next(iterator, None)
    # This fetch must not be reported.
    next(iterator, None)
    are_reported = len(reported) == 2 and reported[1] is StopIteration
    _raise_if_wrong({"fetches of a DataLoader are not reported": are_reported})


@functools.cache
def check_saves() -> None:
    """Check that `wrap_saves` reports when torch opens and closes a file.

    Only custom loops need this check. `torch.save` itself is not called, because user code may have
    replaced it.
    """
    from lflops.torch_private.saving import wrap_saves

    reported: list[object] = []
    with known_torch(), CleanupStack() as undo:
        wrap_saves(undo, lambda: reported.append("begins"), reported.append)
        with torch.serialization._open_zipfile_writer(io.BytesIO()) as file:
            is_writer = hasattr(file, "write_record")
    are_reported = is_writer and reported == ["begins", None]
    _raise_if_wrong({"calls of torch.save are not reported": are_reported})


@functools.cache
def check_cuda_memory(device: torch.device) -> None:
    """Check the private functions with which lflops records the memory of a CUDA device.

    Only an out-of-memory report needs these functions. If the user is already recording memory, the
    user's recording continues, and recorded allocations are not checked.
    """
    with known_torch(), dispatch_modes.without_modes():
        is_users = cuda_memory.is_recording_memory()
        if not is_users:
            cuda_memory.record_memory(16)
        try:
            during = cuda_memory.is_recording_memory()
            made = torch.zeros(1, device=device)
            segments, trace = _of_snapshot(cuda_memory.memory_snapshot())
            del made
        finally:
            if not is_users:
                cuda_memory.stop_recording_memory()
        after = cuda_memory.is_recording_memory()
    _raise_if_wrong(
        {
            "an active recording of CUDA memory is not detected": during,
            "a recording of CUDA memory cannot be stopped": after == is_users,
            "a snapshot of CUDA memory lacks the expected block fields": segments,
            "a snapshot of CUDA memory lacks the expected trace entries": trace or is_users,
        }
    )


def _of_snapshot(snapshot: Any) -> tuple[bool, bool]:
    """Check the contents of a memory snapshot.

    Returns whether it has a memory block in use, and whether it has a recorded allocation with a
    line of Python code. The block and the allocation must have all fields that lflops reads.
    """
    has_block = False
    for segment in snapshot.get("segments", ()):
        for block in segment.get("blocks", ()):
            is_complete = block.keys() >= {"size", "requested_size", "state"}
            if is_complete and block["state"] == "active_allocated":
                has_block = True
    has_allocation = False
    for trace in snapshot.get("device_traces", ()):
        for entry in trace:
            is_complete = entry.keys() >= {"addr", "size", "frames"}
            if is_complete and entry.get("action") == "alloc" and _has_line(entry["frames"]):
                has_allocation = True
    return has_block, has_allocation


def _has_line(frames: Any) -> bool:
    return any(frame.keys() >= {"filename", "line", "name"} for frame in frames)


def _raise_if_wrong(facts: Mapping[str, bool]) -> None:
    wrong = [difference for difference, holds in facts.items() if not holds]
    if wrong:
        raise differs("; ".join(wrong))


def _no_op(*_: object) -> None:
    """Do nothing. This function is registered as a hook in the checks."""


class _Operators(dispatch_modes.TorchDispatchMode):
    """A dispatch mode for the checks, which records all operators that run.

    For each matmul of backward, it also records the sequence number of the autograd node that runs
    it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []
        self.matmul_nodes: list[int] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(function)
        node = autograd.current_node()
        if function is aten.mm.default and node is not None:
            self.matmul_nodes.append(autograd.sequence_number(node))
        return function(*args, **(kwargs or {}))


def _numbering() -> dict[str, bool]:
    """Check how autograd nodes are numbered and how backward passes are reported.

    Two matmuls use the same input and weight. Therefore only the sequence numbers of their autograd
    nodes distinguish the matmuls of backward. Returns, for each possible error message, whether
    torch behaves as expected.
    """
    ran = _Operators()
    dispatch_modes.route_higher_order_operators(_Operators)
    x = torch.zeros(2, 2, device="cpu", dtype=torch.float32, requires_grad=True)
    w = torch.zeros(2, 2, device="cpu", dtype=torch.float32, requires_grad=True)
    before = autograd.next_sequence_number()
    first = x.mm(w)
    between = autograd.next_sequence_number()
    second = x.mm(w)
    ended: list[int] = []

    def note_end() -> None:
        ended.append(len(ran.matmul_nodes))

    first.register_hook(lambda _: autograd.after_backward(note_end))
    after = autograd.next_sequence_number()
    outside = autograd.backward_id()
    with CleanupStack() as undo:
        undo.add(dispatch_modes.end_mode, ran)
        with dispatch_modes.on_stack(ran):
            grad([first, second], [x, w], [torch.zeros_like(first)] * 2)
        dispatch_modes.push_mode(ran)
    dispatch_modes.sweep_modes()
    reported: list[int] = []
    with CleanupStack() as undo:
        # The function before the pass returns 7 for one loss. The function after it receives the 7.
        autograd.wrap_backward(
            undo, lambda losses: 6 + len(losses), lambda *begun: reported.extend(begun)
        )
        backward((x * 1).sum())
    # This pass must not be reported.
    backward((x * 1).sum())
    derivatives: list[int] = []
    with CleanupStack() as undo:
        autograd.watch_derivatives(undo, lambda: derivatives.append(len(reported)))
        # Only the second pass must be reported.
        backward((x * 1).sum())
        grad((x * 1).sum(), x)

    is_in_order = before < between < after
    are_numbers_kept = ran.matmul_nodes == [after - 1, after - 1, between - 1, between - 1]
    operator_names = [operators.qualified_name(operator) for operator in ran.seen]
    third = (x * 1).mm(w)
    leaves = {id(leaf) for leaf in autograd.leaves([third])}
    nodes = list(autograd.nodes_behind([third.grad_fn]))
    is_recording = autograd.profiler_is_recording()
    return {
        "dispatch modes cannot be removed": ran not in dispatch_modes.open_modes(),
        "autograd nodes are not numbered in the order of their creation": is_in_order,
        "the sequence number of an autograd node changes before backward": are_numbers_kept,
        "two backward passes cannot be told apart": outside == autograd.NO_BACKWARD,
        "the end of a backward pass is not reported": ended == [4] and reported == [7],
        "torch.autograd.grad is not distinguished from Tensor.backward": derivatives == [1],
        "operators have unexpected names": "aten::mm" in operator_names,
        "autograd nodes have unexpected names": "MmBackward" in autograd.node_name(third.grad_fn),
        "the leaves of an autograd graph are not found": leaves == {id(x), id(w)},
        "the nodes of an autograd graph are not found": len(nodes) == 4,
        "it is unknown whether a profiler is recording": is_recording in (True, False),
        "the start of a profiler is not reported": _are_profilers_seen(),
    }


def _are_profilers_seen() -> bool:
    """Return whether `wrap_profilers` reports the start of a profiler.

    The check starts no profiler, because this would stop a profiler that is already recording.
    """
    kind = torch.autograd.profiler.profile
    before = kind._prepare_trace
    with CleanupStack() as undo:
        autograd.wrap_profilers(undo, _no_op)
        within = kind._prepare_trace
    if within is before or kind._prepare_trace is not before:
        return False
    callers = (kind.__enter__, torch.profiler.profile.prepare_trace)
    return all("_prepare_trace" in function.__code__.co_names for function in callers)


def _of_operators() -> dict[str, bool]:
    matmul = aten.mm.default
    linear = aten.linear.default
    add_ = aten.add_.Tensor
    x = torch.ones(1, 2, device="cpu", dtype=torch.float32)
    are_views_marked = aten.t.default.is_view and not matmul.is_view
    is_composite = operators.decomposes(linear) and not operators.decomposes(matmul)
    decomposed = operators.decompose(linear, (x, x), {})
    makes_storage = operators.makes_storage(matmul) and not operators.makes_storage(add_)
    direct = operators.direct_call(matmul)(x, x.t())
    is_function_kept = operators.direct_call(len) is len
    takes_list = operators.has_list_argument(aten.cat.default)
    takes_no_list = not operators.has_list_argument(matmul)
    names = [name for name, _ in operators.argument_names(matmul)]
    is_overload_listed = matmul in operators.overloads_of(aten.mm)
    has_string_overloads = operators.overloads_of("mm") != []
    is_write_marked = operators.written_arguments(add_) == (("self", 0),)
    has_nested_kernel = operators.has_nested_kernel(aten.matmul.default)
    nested_kernel = operators.nested_kernel(matmul, (x, x))
    python_kernel = operators.python_kernel(matmul, (x, x), {})
    without_overrides = operators.call_without_overrides(matmul)(x, x.t())
    run = operators.run_kernel(matmul, torch._C.DispatchKey.CPU, (x, x.t()), {})
    attention = operators.attention_kernels().keys()
    known = {"attention_math", "flash_attention", "efficient_attention", "cudnn_attention"}
    return {
        "view operators are not marked as views": are_views_marked,
        "composite operators are not marked as composite": is_composite,
        "composite operators cannot be decomposed": decomposed.item() == 2,
        "arguments that an operator writes to are not marked": is_write_marked,
        "operators whose results have new storage are not recognized": makes_storage,
        "an operator cannot be called directly": direct.item() == 2 and is_function_kept,
        "arguments that are lists of tensors are not marked": takes_list and takes_no_list,
        "operator arguments have unexpected names": names == ["self", "mat2"],
        "the overloads of an operator are not listed": is_overload_listed
        and not has_string_overloads,
        "kernels for nested tensors are not found": has_nested_kernel,
        "a plain tensor is reported as a nested tensor": nested_kernel is None,
        "a C++ kernel of torch is reported as a Python kernel": python_kernel is None,
        "an operator cannot be called without overrides": without_overrides.item() == 2,
        "a kernel cannot be run directly": run.item() == 2,
        "torch has unknown attention kernels": attention <= known,
    }


def _of_tensors() -> dict[str, bool]:
    x = torch.zeros(2, 2, device="cpu", dtype=torch.float32)
    storage, key = tensors.storage_key(x)
    _, key_of_view = tensors.storage_key(x.view(4))
    has_key = key == key_of_view and storage.nbytes() == x.nbytes
    sparse = torch.eye(3, device="cpu", dtype=torch.float32).to_sparse()
    indices, values = tensors.sparse_parts(sparse)
    sparse_sizes = (*indices.shape, *values.shape, tensors.stored_elements(sparse))
    with tensors.without_overrides():
        attributes = (
            tensors.shape_key(x),
            tensors.is_integer(x),
            tensors.is_integer(indices),
            tensors.nested_offsets(x),
            tensors.node_of(x),
        )
    are_attributes_right = attributes == ((2, 2), False, True, None, None)
    has_overrides = tensors.is_overridden(([x], x, 1)) or tensors.has_torch_function((x,))
    is_called = tensors.with_overrides(len)([x]) == 1
    written = torch.zeros(1, device="cpu").add_(1)
    is_constructed = _constructs_under_a_mode(x)
    can_stay_compiled = dispatch_modes.can_stay_compiled() in (True, False)
    is_not_traced = can_stay_compiled and not dispatch_modes.is_tracing()
    return {
        "a tensor and its view do not have the same storage key": has_key,
        "a sparse tensor has unexpected parts": sparse_sizes == (2, 3, 3, 3),
        "the attributes of a plain tensor are read incorrectly": are_attributes_right,
        "a plain tensor is reported to override __torch_function__": not has_overrides,
        "a function cannot be called as a plain one and as an overridden one": is_called,
        "a plain tensor is reported as a part of a DTensor": tensors.local_part(x) is x,
        "a plain tensor is reported as a fake tensor": not tensors.only_shapes_run([x]),
        "in-place writes to a tensor are not counted": tensors.version_of(written) == 1,
        "a tensor subclass cannot be constructed under a dispatch mode": is_constructed,
        "torch reports tracing (torch.jit.trace) although nothing is traced": is_not_traced,
    }


class _Subclass(torch.Tensor):
    """A tensor subclass for the checks."""


def _constructs_under_a_mode(x: torch.Tensor) -> bool:
    """Return whether a tensor subclass can be constructed while a dispatch mode is active.

    This works if lflops takes its modes off the stack while the constructor runs. They must be on
    the stack again afterwards.
    """
    mode = dispatch_modes.InternalMode()
    with CleanupStack() as undo, dispatch_modes.on_stack(mode):
        tensor_constructors.construct_without_modes(undo)
        with dispatch_modes.without_own_modes() as removed:
            within = dispatch_modes.open_modes()
        constructed = _Subclass(x)
        after = dispatch_modes.open_modes()
    is_stack_right = removed == [mode] and mode not in within and after[-1:] == [mode]
    return type(constructed) is _Subclass and is_stack_right


def _are_compilations_reported() -> bool:
    """Return whether functions can be registered with torch.compile, and removed again.

    If torch.compile is not loaded, registering does nothing.
    """
    compilations = modules.Compilations(_no_op)
    with CleanupStack() as undo:
        undo.add(compilations.stop)
        compilations.listen(lambda function: function)
        is_registered = compilations.listens
    is_loaded = "torch._dynamo.callback" in sys.modules
    return (is_registered or not is_loaded) and not compilations.listens


def _are_hooks_found(module: nn.Module) -> bool:
    """Return whether `remove_hook` finds the hooks of modules, of optimizers, and global hooks."""
    # The constructor of an optimizer would load torch.compile.
    optimizer = Optimizer.__new__(Optimizer)
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
    owners: list[tuple[Any, list[Callable[..., Any]]]] = [
        (module, [module.register_forward_pre_hook, module.register_forward_hook]),
        (optimizer, [optimizer.register_step_pre_hook, optimizer.register_step_post_hook]),
        (None, [register_module_forward_pre_hook, register_module_forward_hook]),
        (None, [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]),
    ]
    found = True
    for owner, registers in owners:
        with CleanupStack() as undo:
            undo.add(modules.remove_hook, _no_op, owner)
            handles = [register(_no_op) for register in registers]
            modules.call_last(_no_op)
            if owner is None:
                are_of_optimizers = registers[-1] is register_optimizer_step_post_hook
                found = found and modules.is_called_last(_no_op) == are_of_optimizers
        for handle in handles:
            registry = handle.hooks_dict_ref()
            found = found and registry is not None and handle.id not in registry
            handle.remove()
    return found


def _hides_hooks(module: nn.Module) -> bool:
    """Return whether hooks can be hidden from TorchScript and, if it is loaded, torch.compile."""
    modules.never_compiled(_no_op)
    handler: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    before = () if handler is None else tuple(handler.start_callbacks)
    hidden = modules.HiddenHooks((_no_op,))
    with CleanupStack() as undo:
        undo.add(hidden.stop)
        hidden.start()
        module._forward_pre_hooks[0] = _no_op
        modules.scripted_without(undo, lambda hook: hook is _no_op)
        is_registered = handler is None or len(handler.start_callbacks) == len(before) + 1
        are_off = is_registered and torch.jit._recursive.get_hook_stubs(module) == ([], [])
    return are_off and (handler is None or tuple(handler.start_callbacks) == before)


def _are_own_hooks_called() -> bool:
    """Return whether an `InternalModule` calls its hooks as torch calls global hooks."""
    called: list[tuple[Any, ...]] = []

    class Own(modules.InternalModule):
        def forward(self, x: int) -> int:
            return x + 1

    Own.hooked(
        lambda _, args: called.append(args),
        lambda _, args, kwargs, output: called.append((*args, kwargs, output)),
    )
    return Own()(1) == 2 and called == [(1,), (1, {}, 2)]


def _are_hooks_listed() -> bool:
    """Return whether the hooks on a module and on a parameter are listed."""
    module = nn.Module()
    parameter = nn.Parameter(torch.zeros(1, device="cpu", dtype=torch.float32))

    def listed() -> list[int]:
        before = modules.hooks_before_forward(module)
        after = modules.hooks_after_forward(module)
        return [len(before), len(after), len(modules.gradient_hooks(parameter))]

    without = listed()
    module._forward_pre_hooks[0] = _no_op
    module._forward_hooks[0] = _no_op
    parameter.register_hook(_no_op)
    parameter.register_post_accumulate_grad_hook(_no_op)
    return without == [0, 0, 0] and listed() == [1, 1, 2]


def _of_modules() -> dict[str, bool]:
    child = modules.InternalModule()
    parent = nn.Module()
    modules.without_global_hooks(nn.Module.add_module)(parent, "0", child)
    modules.without_global_hooks(nn.Module.register_buffer)(parent, "buffer", None)
    is_child_found = list(modules.child_modules(parent)) == [("0", child)]
    are_parts_found = modules.self_parts(parent) == ([child], [])
    is_compiled = modules.is_compiled(parent) or modules.is_compiled_in_place(parent)
    has_wrapper = modules.compiled_wrapper(parent) is not parent
    packed = modules.packed_parameters(parent)
    unknown_group = distributed.group_named("no such group")
    is_store_right = distributed.group_store() is None or torch.distributed.is_initialized()
    return {
        "submodules of a module are not found": is_child_found,
        "submodules and parameters of a module are not found": are_parts_found,
        "buffers of a module are not found": modules.buffers_of(parent) == {"buffer": None},
        "a plain module is reported as compiled": not is_compiled,
        "a plain module is mistaken for a wrapper such as DDP": modules.unwrapped(parent) is parent,
        "a plain module is reported to have a compiled wrapper": not has_wrapper,
        "a plain module is reported to have packed parameters": packed == [],
        "compilations are not counted": modules.compilations() >= 0,
        "graph breaks are not counted": modules.graph_breaks() >= 0,
        "the time of compilations is unknown": modules.compile_seconds() >= 0,
        "the start of a compilation is not reported": _are_compilations_reported(),
        "hooks cannot be hidden from torch.compile or TorchScript": _hides_hooks(parent),
        "registered hooks are not found": _are_hooks_found(parent),
        "the hooks of a module or of a parameter are not listed": _are_hooks_listed(),
        "the hooks of modules that lflops makes for itself are not called": _are_own_hooks_called(),
        "a plain module is reported as sharded": not list(distributed.flat_parts(parent)),
        "an unknown process group is found by name": unknown_group is None,
        "a key-value store is found without a process group": is_store_right,
    }
