"""The sentence of each note, made from its code, subject and values."""

from collections.abc import Callable, Mapping

from lflops import units
from lflops.profile.notes import Note, NoteCode, are_times_far_off

__all__ = ["SENTENCES", "sentence"]

_REFUSALS = {
    "other_profiler": "another torch.profiler was running in this process, and Kineto serves one at a time",
    "own_trace": "another trace of lflops' was being recorded, and Kineto serves one at a time",
    "cut_off": "another torch.profiler began while ours recorded, and Kineto serves one at a time",
    "no_activity": "torch can record none of the activities here",
    "not_written": "its file could not be written",
}


def sentence(note: Note) -> str:
    """The sentence of a note. A code that is unknown here still shows its subject and values."""
    return SENTENCES.get(note.code, _unknown)(note)


def _ignored(note: Note) -> str:
    work = f"{_count(note, 'macs')} MACs and {_count(note, 'flops')} FLOPs in {_calls(note)}"
    took = f", {_duration(note, 'seconds')}" if "seconds" in note.values else ""
    return f"{note.subject or 'the model itself'} is left out of every total, as asked: {work}{took}"


def _ambiguous_threads(note: Note) -> str:
    return f"the work of {_calls(note)} in backward is counted as the model's own: its module is unknown"


def _communication_hook(note: Note) -> str:
    later = "what it computes when a collective ends is counted only where it runs on the same thread, which it does not with gloo"
    return f"{_calls(note)} of DDP's communication hook are counted as other work: {later}"


def _formula_failed(note: Note) -> str:
    return f"the formula of {note.subject} failed, so its calls are not counted: {note.values.get('error', units.UNKNOWN)}"


def _counted_inside(note: Note) -> str:
    calls = "1 call" if note.values.get("calls") == 1 else f"{_count(note, 'calls')} calls"
    return f"{note.subject} has no formula, so {calls} are counted by the operators inside: kernels that it launches itself are in no total"


def _upper_bound(note: Note) -> str:
    calls = "1 call" if note.values.get("calls") == 1 else f"{_count(note, 'calls')} calls"
    why = "what decides it, as the lengths of packed sequences, is not known here"
    return f"{calls} of {note.subject} are counted as the most that they can cost: {why}"


def _dense_mask(note: Note) -> str:
    calls = "1 call" if note.values.get("calls") == 1 else f"{_count(note, 'calls')} calls"
    within, computed = note.values.get("within"), note.values.get("computed")
    share = within / computed if isinstance(within, int) and isinstance(computed, int) and computed else None
    scores = f"{units.percent(share)} of the scores are within a sequence, and all are computed"
    return f"{calls} of {note.subject} separate packed sequences by a dense mask: {scores}; varlen_attn or flex attention skips the others"


def _compiled_ran_eager(note: Note) -> str:
    modules = "1 compiled module was" if note.subject == "1" else f"{note.subject} compiled modules were"
    return f"{modules} counted eagerly: the work is that of the code as written, not as compiled"


def _compiled_uncounted(note: Note) -> str:
    calls = "1 call of a compiled graph is" if note.values.get("calls") == 1 else f"{_count(note, 'calls')} calls of compiled graphs are"
    what = "products by library kernels are counted in the row that called it, generated kernels are not"
    return f"{calls} not counted in full: {what} ({note.subject})"


def _compiled_differs(note: Note) -> str:
    seen, counted = _count(note, "seen"), _count(note, "counted")
    row = note.subject or "the model itself"
    return f"compiled code called by {row} ran kernels of {seen} MACs, and its graphs have {counted}: do not rely on them"


def _compiled_by_module(note: Note) -> str:
    graphs = f"{_count(note, 'graphs')} compiled graph{'' if note.values.get('graphs') == 1 else 's'}"
    assigned, divided = _percent(note, "assigned"), _percent(note, "divided")
    fused = f"{divided} in kernels fused of several modules, divided by the bytes that each module's operators move"
    return f"times inside of {graphs} are from the traced steps: {assigned} of it by module, {fused}"


def _compiled_unopened(note: Note) -> str:
    return f"compiled modules are one row each, though compiled='modules': {note.values.get('error', units.UNKNOWN)}"


def _compiled_unrecorded(note: Note) -> str:
    graphs = f"{_count(note, 'graphs')} compiled graph{' is' if note.values.get('graphs') == 1 else 's are'}"
    return f"{graphs} of no known module: compiled before the monitor began, or by another backend than inductor"


def _scripted(note: Note) -> str:
    return f"the parts of {note.subject or 'the model itself'} run as a script: their work is its own"


def _generated(note: Note) -> str:
    prefill, decode = (f"{_count(note, f'{part}_macs')} MACs ({_count(note, f'{part}_flops')} FLOPs)" for part in ("prefill", "decode"))
    calls = f"{_count(note, 'decode_calls')} call{'' if note.values.get('decode_calls') == 1 else 's'}"
    return f"of forward, prefill has {prefill}, decode {decode} in {calls}"


def _time_scaled(note: Note) -> str:
    factors = ", ".join(f"{phase} by {_count(note, phase)}" for phase in note.values)
    known = [abs(each - 1) for each in note.values.values() if isinstance(each, float | int)]
    rough = f" (± {round(100 * max(known))} %)" if known else ""
    doubt = "; so far off, the machine was busy with something else: do not rely on them" if are_times_far_off([note]) else ""
    return f"module times are rough{rough}: they are scaled to undisturbed passes, {factors or units.UNKNOWN}{doubt}"


def _backward_assumed(note: Note) -> str:
    return f"backward was timed and not counted: it is taken to cost {_count(note, 'forwards')} times the forward"


def _experts(note: Note) -> str:
    return f"{_count(note, 'expert_parameters')} parameters are experts', {_count(note, 'non_expert_parameters')} are not"


def _rounded_to_cycles(note: Note) -> str:
    return f"the schedule is rounded up to whole steps of {_count(note, 'accumulation')} batches, over which gradients are accumulated"


def _schedule_shrunk(note: Note) -> str:
    left = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in note.values.items() if name != "batches")
    batches = "1 batch" if note.values.get("batches") == 1 else f"{_count(note, 'batches')} batches"
    return f"the schedule is shortened to the run's {batches}, in steps: {left or units.UNKNOWN}"


def _few_clean_steps(note: Note) -> str:
    return f"the times rest on few undisturbed steps: {_count(note, 'steps')}"


def _ended_early(note: Note) -> str:
    return f"the training was left by {note.subject or 'an exception'} before the window was over"


def _no_trace(note: Note) -> str:
    error = f" ({note.values['error']})" if "error" in note.values else ""
    return f"there is no trace: {_REFUSALS.get(note.subject, note.subject or 'the reason is not known')}{error}"


def _not_counted(note: Note) -> str:
    why = ": under this torch compiled code would run otherwise in a counted step; count it with lflops.count" if note.subject else ""
    return f"no step was counted: there are times, and no work{why}"


def _ranks_missing(note: Note) -> str:
    return f"{_count(note, 'missing')} of {_count(note, 'world_size')} ranks gave no profile: {note.subject}"


def _ranks_differ(note: Note) -> str:
    macs = f"{_count(note, 'least_macs')} to {_count(note, 'most_macs')} MACs"
    others = f", {_count(note, 'rows_of_others')} rows are other ranks'" if note.values.get("rows_of_others") else ""
    return f"ranks differ: {macs}; the counts are those of rank {note.values.get('leading_rank', units.UNKNOWN)}{others}"


def _only_on(note: Note) -> str:
    first, last, number = (note.values.get(each, units.UNKNOWN) for each in ("first", "last", "modules"))
    modules = first if number == 1 else f"{first} to {last}, {_count(note, 'modules')} modules"
    who = f"rank {note.subject} has" if note.subject.isdecimal() else f"ranks {note.subject} have"
    return f"only {who} {modules}"


def _logical_differs(note: Note) -> str:
    where = f"{note.values.get('phase', units.UNKNOWN)} of {note.subject or 'the model itself'}"
    return f"logical= is of another model or batch, so it tells nothing: it differs in {where}"


def _gather_failed(note: Note) -> str:
    return f"the other ranks' profiles could not be gathered: {note.values.get('error', units.UNKNOWN)}"


def _ddp_buckets(note: Note) -> str:
    buckets = f"{_count(note, 'buckets')} bucket{'' if note.values.get('buckets') == 1 else 's'}"
    size = units.size(nbytes if isinstance(nbytes := note.values.get("bytes"), int) else None)
    return f"DistributedDataParallel cannot run on fake tensors: lflops made its {buckets} of gradients itself, {size}"


def _foreach_assumed(note: Note) -> str:
    return f"the optimizer is taken to work on lists of parameters, as torch does on {note.subject} unless foreach=False"


def _not_captured(note: Note) -> str:
    return f"{note.subject} is estimated without capturable, which needs a device that captures"


def _attention_on_cuda(note: Note) -> str:
    calls = ", ".join(f"{name.replace('_', ' ')} {calls} time{'' if calls == 1 else 's'}" for name, calls in note.values.items())
    return f"scaled_dot_product_attention is the kernel that torch picks on {note.subject}: {calls}"


def _gradients_taken_for_finite(note: Note) -> str:
    return f"a GradScaler scales the loss and, before {note.subject}'s step, the gradients; all are taken for finite, so every step is made"


def _rounded_up(note: Note) -> str:
    return f"each tensor's memory is rounded up to a multiple of {_count(note, 'bytes')} bytes"


def _lstm_workspace(note: Note) -> str:
    workspaces = f"the workspaces of {_count(note, 'calls')} LSTM call{'' if note.values.get('calls') == 1 else 's'}"
    if note.subject:
        return f"{workspaces} on {note.subject} are not in the memory, because their size is not known before a run: leave room for them"
    return f"{workspaces} are in the memory, as oneDNN 3 lays them out on a CPU; another version may need another size"


def _unknown(note: Note) -> str:
    values = ", ".join(f"{name} {value}" for name, value in note.values.items())
    head = " ".join(filter(None, [note.code.replace("_", " "), note.subject]))
    return f"{head}: {values}" if values else head


def _calls(note: Note) -> str:
    return f"{_count(note, 'calls')} operator call{'' if note.values.get('calls') == 1 else 's'}"


def _count(note: Note, name: str) -> str:
    value = note.values.get(name)
    return value if isinstance(value, str) else units.count(value)


def _percent(note: Note, name: str) -> str:
    value = note.values.get(name)
    return value if isinstance(value, str) else units.percent(value)


def _duration(note: Note, name: str) -> str:
    value = note.values.get(name)
    return value if isinstance(value, str) else units.duration(value)


SENTENCES: Mapping[NoteCode, Callable[[Note], str]] = {
    "ignored": _ignored,
    "ambiguous_threads": _ambiguous_threads,
    "communication_hook": _communication_hook,
    "formula_failed": _formula_failed,
    "compiled_by_module": _compiled_by_module,
    "compiled_differs": _compiled_differs,
    "compiled_ran_eager": _compiled_ran_eager,
    "compiled_uncounted": _compiled_uncounted,
    "compiled_unopened": _compiled_unopened,
    "compiled_unrecorded": _compiled_unrecorded,
    "scripted": _scripted,
    "generated": _generated,
    "time_scaled": _time_scaled,
    "backward_assumed": _backward_assumed,
    "experts": _experts,
    "rounded_to_cycles": _rounded_to_cycles,
    "schedule_shrunk": _schedule_shrunk,
    "few_clean_steps": _few_clean_steps,
    "ended_early": _ended_early,
    "no_trace": _no_trace,
    "not_counted": _not_counted,
    "ranks_missing": _ranks_missing,
    "ranks_differ": _ranks_differ,
    "only_on": _only_on,
    "logical_differs": _logical_differs,
    "gather_failed": _gather_failed,
    "ddp_buckets": _ddp_buckets,
    "foreach_assumed": _foreach_assumed,
    "not_captured": _not_captured,
    "attention_on_cuda": _attention_on_cuda,
    "gradients_taken_for_finite": _gradients_taken_for_finite,
    "rounded_up": _rounded_up,
    "lstm_workspace": _lstm_workspace,
    "upper_bound": _upper_bound,
    "counted_inside": _counted_inside,
    "dense_mask": _dense_mask,
}
