"""The notes of a profile: a row for each code, with the types of its values, its sentence, its cause and its remedy.

A note says something that a reader of the numbers has to know. It holds a code and values; the reports print its sentence.
A new note is a row of `NOTES`, and a `Note(code=...)` where it arises.
"""

import string
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct

from lflops import units


class Note(Struct, frozen=True, kw_only=True):
    """One note.

    Attributes:
        code: What the note says. A file of a later version may have codes that are not in `NOTES`.
        subject: What it is about, as its row in `NOTES` says; may be empty.
        values: By name, of the types in its row.
    """

    code: str
    subject: str
    values: Mapping[str, int | float | str]


class Kind(NamedTuple):
    """What all notes of one code have in common."""

    sentence: str | Callable[[Note], str]  # a template for `_Words`, or a function where the sentence's form depends on the values
    cause: str  # why there is such a note, for the documentation
    remedy: str = "none."  # what the reader can do, for the documentation
    values: Mapping[str, type] = MappingProxyType({})  # the type of each value, by its name; `*` stands for names that depend on the run


def sentence(note: Note) -> str:
    """The sentence of a note. A code that is unknown here still shows its subject and values."""
    template = NOTES[note.code].sentence if note.code in NOTES else _unknown
    return _fill(template, note) if isinstance(template, str) else template(note)


def notes_with(code: str, notes: Iterable[Note]) -> Iterator[Note]:
    """The notes that have a code."""
    return (note for note in notes if note.code == code)


_FAR = 2  # beyond this factor the modules' times are no measure any more


def are_times_far_off(notes: Iterable[Note]) -> bool:
    """Whether the modules' times had to be scaled so much that they are no measure of anything."""
    return any(not 1 / _FAR <= factor <= _FAR for factor in time_factors(notes))


def time_factors(notes: Iterable[Note]) -> list[float]:
    """The factors that the modules' times were scaled by."""
    return [value for note in notes_with("time_scaled", notes) for value in note.values.values() if not isinstance(value, str)]


_UNITS: Mapping[str, Callable[[float | None], str]] = {
    "": units.count,
    "percent": units.percent,
    "duration": units.duration,
    "size": units.size,
}


class _Words(string.Formatter):
    """Fills a template: `{macs}` is a count, `{bytes:size}` is in a unit of `units`, `{calls:call}` a count with its noun.

    A noun takes an s in the plural; another plural stands after a slash. A value that is missing is a dash.
    """

    def format_field(self, value: float | str | None, format_spec: str) -> str:
        if isinstance(value, str):
            return value
        if format_spec in _UNITS:
            return _UNITS[format_spec](value)
        singular, _, plural = format_spec.partition("/")
        return f"{units.count(value)} {singular if value == 1 else plural or f'{singular}s'}"


_WORDS = _Words()


def _fill(template: str, note: Note) -> str:
    """The template with the values of a note, its `subject`, and as `row` its subject as a module's name."""
    names: dict[str, float | str | None] = {**note.values, "subject": note.subject, "row": note.subject or "the model itself"}
    return _WORDS.vformat(template, (), defaultdict(lambda: None, names))


def _ignored(note: Note) -> str:
    took = ", {seconds:duration}" if "seconds" in note.values else ""
    return _fill(f"{{row}} is left out of every total, as asked: {{macs}} MACs and {{flops}} FLOPs in {{calls:operator call}}{took}", note)


def _dense_mask(note: Note) -> str:
    within, computed = note.values.get("within"), note.values.get("computed")
    share = within / computed if isinstance(within, int) and isinstance(computed, int) and computed else None
    scores = f"{units.percent(share)} of the scores are within a sequence, and all are computed"
    calls = _fill("{calls:call} of {subject} separate packed sequences by a dense mask", note)
    return f"{calls}: {scores}; varlen_attn or flex attention skips the others"


def _compiled_ran_eager(note: Note) -> str:
    modules = "1 compiled module was" if note.subject == "1" else f"{note.subject} compiled modules were"
    return f"{modules} counted eagerly: the work is that of the code as written, not as compiled"


def _time_scaled(note: Note) -> str:
    factors = ", ".join(f"{phase} by {_WORDS.format_field(factor, '')}" for phase, factor in note.values.items())
    known = [abs(each - 1) for each in note.values.values() if isinstance(each, float | int)]
    rough = f" (± {round(100 * max(known))} %)" if known else ""
    doubt = "; so far off, do not rely on them" if are_times_far_off([note]) else ""
    return f"module times are rough{rough}: they are scaled to undisturbed passes, {factors or units.UNKNOWN}{doubt}"


def _no_timed_events(note: Note) -> str:
    waits = "lflops waits for the device at the end of each step" if note.values.get("waits") else "steps are timed by the host's clock"
    return _fill("torch cannot time events on {subject}: ", note) + f"{waits}, and the phases of a step are the host's"


def _schedule_shrunk(note: Note) -> str:
    left = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in note.values.items() if name != "batches")
    return _fill("the schedule is shortened to the run's {batches:batch/batches}, in steps: ", note) + (left or units.UNKNOWN)


_REFUSALS = {
    "other_profiler": "another torch.profiler was running in this process, and Kineto serves one at a time",
    "own_trace": "another trace of lflops' was being recorded, and Kineto serves one at a time",
    "cut_off": "another torch.profiler began while ours recorded, and Kineto serves one at a time",
    "no_activity": "torch can record none of the activities here",
    "not_written": "its file could not be written",
}


def _no_trace(note: Note) -> str:
    error = f" ({note.values['error']})" if "error" in note.values else ""
    return f"there is no trace: {_REFUSALS.get(note.subject, note.subject or 'the reason is not known')}{error}"


def _not_counted(note: Note) -> str:
    why = ": under this torch compiled code would run otherwise in a counted step; count it with lflops.count" if note.subject else ""
    return f"no step was counted: there are times, and no work{why}"


def _ended_early(note: Note) -> str:
    return f"the training was left by {note.subject or 'an exception'} before the window was over"


def _ranks_differ(note: Note) -> str:
    leading = note.values.get("leading_rank", units.UNKNOWN)
    others = _fill(", {rows_of_others} rows are other ranks'", note) if note.values.get("rows_of_others") else ""
    return _fill("ranks differ: {least_macs} to {most_macs} MACs", note) + f"; the counts are those of rank {leading}{others}"


def _only_on(note: Note) -> str:
    first, last, number = (note.values.get(each, units.UNKNOWN) for each in ("first", "last", "modules"))
    modules = first if number == 1 else f"{first} to {last}, " + _fill("{modules} modules", note)
    who = f"rank {note.subject} has" if note.subject.isdecimal() else f"ranks {note.subject} have"
    return f"only {who} {modules}"


def _attention_on_cuda(note: Note) -> str:
    calls = ", ".join(f"{name.replace('_', ' ')} {calls} time{'' if calls == 1 else 's'}" for name, calls in note.values.items())
    return f"scaled_dot_product_attention is the kernel that torch picks on {note.subject}: {calls}"


def _lstm_workspace(note: Note) -> str:
    workspaces = _fill("the workspaces of {calls:LSTM call}", note)
    if note.subject:
        return f"{workspaces} on {note.subject} are not in the memory, because their size is not known before a run: leave room for them"
    return f"{workspaces} are in the memory, as oneDNN 3 lays them out on a CPU; another version may need another size"


def _unknown(note: Note) -> str:
    values = ", ".join(f"{name} {value}" for name, value in note.values.items())
    head = " ".join(filter(None, [note.code.replace("_", " "), note.subject]))
    return f"{head}: {values}" if values else head


NOTES: Mapping[str, Kind] = {
    # Counting.
    "anomaly_mode": Kind(
        "anomaly detection is on, which makes steps longer",
        cause="`torch.autograd.set_detect_anomaly` is on: each operator of forward keeps its stack, and backward looks for NaN.",
        remedy="switch it off when you have found what you look for.",
    ),
    "eval_mode": Kind(
        "all modules are in eval mode while they are trained: dropout does nothing, and norms do not learn their statistics",
        cause="`model.eval()` was called, or `from_pretrained` has done so, and no `model.train()` after it.",
        remedy="call `model.train()` before you train.",
    ),
    "ambiguous_threads": Kind(
        "the work of {calls:operator call} in backward is counted as the model's own: its module is unknown",
        values={"calls": int},  # operator calls in backward whose module is unknown; they are the root's own
        cause="backward ran on several threads, and two operators carry the same number, so the module of one is unknown.",
        remedy="none is needed for totals. For exact rows, count with `torch.autograd.set_multithreading_enabled(False)`.",
    ),
    "communication_hook": Kind(
        "{calls:operator call} of DDP's communication hook are counted as other work: what it computes when a collective ends is counted "
        "only where it runs on the same thread, which it does not with gloo",
        values={"calls": int},  # operator calls of a communication hook of DDP, counted as `other`
        cause="a communication hook of DDP, such as PowerSGD, computes something, which is `other` work of the model itself.",
        remedy="none is needed for the model's work, which is exact.",
    ),
    "compiled_differs": Kind(
        "compiled code called by {row} ran kernels of {seen} MACs, and its graphs have {counted}: do not rely on them",
        values={"seen": int, "counted": int},  # subject: the row; MACs seen while compiled code ran, and those of its graph
        cause="while compiled code ran, library kernels made more products than its graph has.",
        remedy="report it, with the model and torch's version.",
    ),
    "compiled_ran_eager": Kind(
        _compiled_ran_eager,
        cause="`lflops.count`, `lflops.measure` and estimates run the Python code of compiled modules; a counted step runs compiled.",
        remedy="none. Compilation fuses operators; it does not change MACs.",
    ),
    "compiled_uncounted": Kind(
        "{calls:call of a compiled graph is/calls of compiled graphs are} not counted in full: products by library kernels are counted in "
        "the row that called it, generated kernels are not ({subject})",
        values={"calls": int},  # subject: why the work of these calls of compiled graphs is not known
        cause="it was compiled before lflops watched, or values that were not seen decide what it does.",
        remedy="create the monitor, or `lflops.counting(model)`, before the first call of the compiled model.",
    ),
    "counted_inside": Kind(
        "{subject} has no formula, so {calls:call} are counted by the operators inside: kernels that it launches itself are in no total",
        values={"calls": int},  # subject: a custom operator without a formula, counted by the operators that run inside it
        cause="a custom operator has no formula, and PyTorch operators ran inside it.",
        remedy="if the operator also launches a kernel directly, register its cost with `lflops.register_formula`.",
    ),
    "dense_mask": Kind(
        _dense_mask,
        values={"calls": int, "computed": int, "within": int},  # subject: attention; scores computed, and those within a sequence
        cause="a dense mask separates packed sequences, as that of `transformers` for `sdpa` if position ids restart.",
        remedy="use attention that takes lengths or a block mask: `varlen_attn`, flash attention or flex attention.",
    ),
    "formula_failed": Kind(
        "the formula of {subject} failed, so its calls are not counted: {error}",
        values={"error": str},  # subject: the operator
        cause="a formula raised an exception.",
        remedy="the error is in the sentence. Correct your formula, or report ours.",
    ),
    "generated": Kind(
        "of forward, prefill has {prefill_macs} MACs ({prefill_flops} FLOPs), decode {decode_macs} MACs ({decode_flops} FLOPs) in "
        "{decode_calls:call}",
        values={"prefill_macs": int, "prefill_flops": int, "decode_macs": int, "decode_flops": int, "decode_calls": int},
        cause='`mode="generate"` counted prefill and decode together.',
        remedy="none. The sentence has both parts.",
    ),
    "ignored": Kind(
        _ignored,
        values={"calls": int, "macs": int, "flops": int, "seconds": float},  # subject: the row; seconds only where it was timed
        cause="you left out a module with `ignore=` or `ignore_modules=`.",
    ),
    "logical_differs": Kind(
        "logical= is of another model or batch, so it tells nothing: it differs in {phase} of {row}",
        values={"phase": str},  # subject: the first row that differs from the model given as `logical=`
        cause="`logical=` is a profile of another model, or of another batch.",
        remedy="count the unsharded model with one rank's batch.",
    ),
    "not_counted": Kind(
        _not_counted,
        cause="no step was counted, for example because the run ended before.",
        remedy="use a shorter schedule, as `Schedule(wait=0, warmup=1)`.",
    ),
    "scripted": Kind(
        "the parts of {row} run as a script: their work is its own",
        cause="TorchScript runs a module as one graph, without hooks on the modules inside.",
        remedy="profile the module before `torch.jit.script`.",
    ),
    "upper_bound": Kind(
        "{calls:call} of {subject} are counted as the most that they can cost: what decides it, as the lengths of packed sequences, is not "
        "known here",
        values={"calls": int},  # subject: the operator; values that decide its cost were not known
        cause="lengths of packed sequences, or a mask, are values, and a `meta` or fake tensor has none.",
        remedy="count on a real batch.",
    ),
    # Timing.
    "backward_assumed": Kind(
        "backward was timed and not counted: it is taken to cost {forwards} times the forward",
        values={"forwards": float},  # backward's cost in forwards, where it was timed and not counted
        cause="DeepSpeed's engine timed backward without counting it.",
        remedy="count with `backward=True`.",
    ),
    "few_clean_steps": Kind(
        "the times rest on few undisturbed steps: {steps}",
        values={"steps": int},
        cause="fewer than five steps were undisturbed.",
        remedy="run longer, or use a shorter `wait` and `active`. Until then, do not trust small differences.",
    ),
    "time_scaled": Kind(
        _time_scaled,
        values={"*": float},  # by phase: the factor that hooked times were scaled by
        cause="the median step timed by module differs from the median undisturbed one by more than the hook overhead that is known.",
        remedy="none below a factor of two. Above it, time more steps by module (`active=8`) and on an idle machine.",
    ),
    "no_timed_events": Kind(
        _no_timed_events,
        values={"waits": int},  # subject: the kind of device; 1 where lflops waits for it at the end of each step
        cause="times on a device are taken by events, and this backend has none with times.",
    ),
    "compiled_by_module": Kind(
        "times inside of {graphs:compiled graph} are from the traced steps: {assigned:percent} of it by module, {divided:percent} in "
        "kernels fused of several modules, divided by the bytes that each module's operators move",
        values={"graphs": int, "assigned": float, "divided": float},  # shares of the time inside of compiled graphs
        cause='`compiled="modules"` divided the time of compiled graphs over modules.',
        remedy="none. A large share in fused kernels means that rows are approximate.",
    ),
    "compiled_unopened": Kind(
        "compiled modules are one row each, though compiled='modules': {error}",
        values={"error": str},  # modules inside of compiled ones were asked for, and cannot be had
        cause='this torch, or its compiler, does not give what `compiled="modules"` needs.',
        remedy="the error is in the sentence. Times of the compiled rows are right.",
    ),
    "compiled_unrecorded": Kind(
        "{graphs:compiled graph is/compiled graphs are} of no known module: compiled before the monitor began, or by another backend than "
        "inductor",
        values={"graphs": int},  # compiled graphs that ran, and whose modules are not known
        cause="a graph was compiled before the monitor was made, or by another backend.",
        remedy="make the monitor before the first compiled step.",
    ),
    # Estimates.
    "ddp_buckets": Kind(
        "DistributedDataParallel cannot run on fake tensors: lflops made its {buckets:bucket} of gradients itself, {bytes:size}",
        values={"buckets": int, "bytes": int},  # made by lflops in place of torch's
        cause="DistributedDataParallel copies gradients to buckets, in code that cannot run on fake tensors.",
        remedy="none. With `gradient_as_bucket_view=True` a step needs less, at most by the bytes in the note.",
    ),
    "attention_on_cuda": Kind(
        _attention_on_cuda,
        values={"*": int},  # subject: the chip; by kernel: calls
        cause="`hardware=` names an NVIDIA chip, so attention is the kernel that torch picks there.",
    ),
    "foreach_assumed": Kind(
        "the optimizer is taken to work on lists of parameters, as torch does on {subject} unless foreach=False",
        cause="on CUDA, optimizers work on lists of parameters.",
        remedy="if you pass `foreach=False`, pass it in the estimate as well.",
    ),
    "gradients_taken_for_finite": Kind(
        "a GradScaler scales the loss and, before {subject}'s step, the gradients; all are taken for finite, so every step is made",
        cause="a gradient scaler skips steps with infinite gradients; fake gradients have no values.",
    ),
    "lstm_workspace": Kind(
        _lstm_workspace,
        values={"calls": int},  # subject: the chip of the table that is asked for, where the size is not known
        cause="an LSTM's kernel has its own workspace.",
        remedy="on a GPU, leave room for it.",
    ),
    "not_captured": Kind(
        "{subject} is estimated without capturable, which needs a device that captures",
        cause="`capturable=True` needs a real device.",
        remedy="none. The memory is that of the step without the capture.",
    ),
    "rounded_up": Kind(
        "each tensor's memory is rounded up to a multiple of {bytes} bytes",
        values={"bytes": int},
        cause="you gave `round_to=`.",
    ),
    # The callback's window.
    "ended_early": Kind(
        _ended_early,
        cause="an exception or Ctrl-C ended the training inside a window.",
        remedy="the profile is partial. Run again.",
    ),
    "no_trace": Kind(
        _no_trace,
        cause='the sentence names it. Most often another profiler runs, as with `Trainer(profiler="pytorch")`.',
        remedy="switch the other profiler off, or pass `trace=False`.",
    ),
    "rounded_to_cycles": Kind(
        "the schedule is rounded up to whole steps of {accumulation} batches, over which gradients are accumulated",
        values={"accumulation": int},
        cause="gradients are accumulated, and a schedule counts batches.",
        remedy="none, or use multiples of the accumulation.",
    ),
    "schedule_shrunk": Kind(
        _schedule_shrunk,
        values={"batches": int, "skip_first": int, "wait": int, "warmup": int, "active": int, "windows": int},
        cause="the run has fewer batches than the schedule.",
        remedy="give a shorter `Schedule`.",
    ),
    # Ranks.
    "experts": Kind(
        "{expert_parameters} parameters are experts', {non_expert_parameters} are not",
        values={"expert_parameters": int, "non_expert_parameters": int, "tensor_parallel": int},  # of all ranks together
        cause="the model has experts that are distributed over ranks.",
        remedy="none. Their parameters are listed separately, as DeepSpeed does.",
    ),
    "gather_failed": Kind(
        "the other ranks' profiles could not be gathered: {error}",
        values={"error": str},
        cause="ranks cannot reach each other's store.",
        remedy="each rank's profile is in a file. Merge them with `lflops.merge`.",
    ),
    "only_on": Kind(
        _only_on,
        values={"modules": int, "first": str, "last": str},  # subject: the ranks that have these modules
        cause="pipeline stages, or different models.",
        remedy="none with a pipeline. Otherwise check how ranks build the model.",
    ),
    "ranks_differ": Kind(
        _ranks_differ,
        values={"leading_rank": int, "least_macs": int, "most_macs": int, "least_flops": int, "most_flops": int, "rows_of_others": int},
        cause="ranks do different work: uneven batches, a pipeline, experts.",
        remedy="if it is unexpected, look at the ranks' MACs in `lflops show`.",
    ),
    "ranks_missing": Kind(
        "{missing} of {world_size} ranks gave no profile: {subject}",
        values={"missing": int, "world_size": int},  # subject: the ranks
        cause="a rank was killed, or did not report within `gather_timeout`.",
        remedy="look at that rank's log.",
    ),
}
