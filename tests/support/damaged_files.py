"""Damage files with a seed: traces, snapshots, profiles, tables of chips, configurations.

The damage is in the bytes of a file, or in one of its values. Each file is read by a command, as a
user would do. The possible results are:

- refused: exit status 2 and one line
- remarked: the file is read, and the output reports that something is left out
- same: the file is read, and every number is equal to the number of the undamaged file
- less: like `same`, but some numbers are missing
- other: the file is read, with the numbers that it now contains, for example if a digit or the name
  of a kernel was changed

The result is *silent* instead of *other*, and a defect, if the damaged value cannot be valid: it is
missing, has another type, or is impossible, such as a negative size or a part that is larger than
its whole. A *traceback* is a defect too.
"""

import contextlib
import copy
import functools
import io
import json
import pickle
import random
import re
import signal
import sys
import tempfile
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import lflops
from lflops.cli.main import main as shell
from lflops.errors import LflopsError
from lflops.integrations.deepspeed.config import arguments_of
from lflops.trace.analysis.merge import MERGED
from lflops.trace.convert import place
from tests.memory.snapshots.test_causes import PLANTED
from tests.memory.snapshots.test_modules import PYTHON, Words, training
from tests.support.memory_snapshots import Recorder
from tests.support.traces_by_hand import small_gpu_trace

LONGEST = 30
"""Seconds that a command may take."""
HUGE = 10**30
OTHER_TYPES: list[Any] = [
    "text",
    "",
    True,
    [],
    {},
    [1, "a"],
    {"a": {}},
    -1,
    -0.5,
    1e308,
    HUGE,
    10**5000,
]
"""Values that replace a value of another type."""
CHIP = """
[[Mine]]
name = "My chip"
names = ["mine", "my"]
peaks = { bf16 = 989.5e12, fp32 = 67e12 }
bandwidth = 3.35e12
memory_gib = 80
usable_gib = 79.1
cache_mib = 50
link = 450e9
source = "a data sheet"
date = 2025-01-02
"""
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
DEEPSPEED = {
    "train_batch_size": 8,
    "flops_profiler": {
        "enabled": True,
        "profile_step": 5,
        "module_depth": -1,
        "top_modules": 3,
        "detailed": True,
    },
}


class Kind(NamedTuple):
    """Files of one kind.

    Attributes:
        suffix: The end of the file's name.
        originals: Undamaged files.
        values: Decodes a file.
        text: Encodes the decoded values again.
        commands: Returns the commands that read a file. They run in order, until one refuses.
        share: The share of all damaged files that are of this kind.
        may_lack: Whether a file is still valid if one of its keys is missing.
    """

    suffix: str
    originals: list[bytes]
    values: Callable[[bytes], Any]
    text: Callable[[Any], bytes]
    commands: Callable[[Path], list[list[str]]]
    share: float
    may_lack: bool = False


def cpu_trace() -> bytes:
    """Return a CPU trace of a small model, with shapes and memory."""
    first = torch.nn.Linear(8, 8)
    second = torch.nn.Linear(8, 8)
    with tempfile.TemporaryDirectory() as folder:
        with profile(
            activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True
        ) as recorder:
            second(checkpoint(first, torch.randn(4, 8), use_reentrant=False)).sum().backward()
        recorder.export_chrome_trace(f"{folder}/trace.json")
        return Path(folder, "trace.json").read_bytes()


def toml(value: Any) -> bytes:
    """Encode a table of chips, which only has one level with lists of tables, as TOML."""
    if not isinstance(value, dict):
        return f"value = {inline(value)}\n".encode()
    lines = []
    for vendor, chips in value.items():
        tables = chips if isinstance(chips, list) else [chips]
        for chip in tables:
            if isinstance(chip, dict):
                lines.append(f"[[{json.dumps(vendor)}]]")
                for key, each in chip.items():
                    lines.append(f"{json.dumps(key)} = {inline(each)}")
            else:
                lines.append(f"{json.dumps(vendor)} = {inline(chips)}")
    return "\n".join(lines).encode()


def inline(value: Any) -> str:
    """Encode a value as TOML on one line."""
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)} = {inline(each)}" for key, each in value.items()]
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    if type(value).__name__ == "date":
        return str(value)
    if value is None:
        return "nan"
    return as_json(value).decode()


def as_json(value: Any) -> bytes:
    """Encode a value as JSON. The integer 10**5000 works too, though Python refuses to print it."""
    return re.sub(
        rb'"\\u0000(\d+)"',
        lambda found: b"1" + b"0" * int(found[1]),
        json.dumps(_marked(value)).encode(),
    )


def _marked(value: Any) -> Any:
    """Replace each 10**5000 inside a value by a text that `as_json` replaces by its digits."""
    if isinstance(value, dict):
        return {key: _marked(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(each) for each in value]
    if type(value) is int and value == 10**5000:
        return "\0" + "5000"
    return value


@functools.cache
def step_and_profile() -> tuple[bytes, bytes]:
    """Return a memory snapshot of one step of a small model, and the profile of this step.

    The snapshot is made from the memory timeline of the profile, in the form in which torch's
    allocator would have recorded it.
    """
    model = Words(checkpoints=False)
    with lflops.counting(model) as counted:
        training(model)(lambda _: contextlib.nullcontext())
    recorder = Recorder()
    memory = counted.profile.memory
    assert memory is not None
    for moment in memory.timeline:
        assert moment.highest_bytes is not None
        if moment.highest_bytes > moment.live_bytes:
            recorder.allocate(
                moment.highest_bytes - moment.live_bytes,
                PYTHON.get(moment.phase, PYTHON["backward"]),
            )
    with tempfile.TemporaryDirectory() as folder:
        counted.profile.save(f"{folder}/step.profile.json")
        return pickle.dumps(recorder.snapshot()), Path(folder, "step.profile.json").read_bytes()


def beside(path: Path, content: bytes) -> str:
    """Write an undamaged file next to the damaged file, and return its path."""
    file = path.with_name("whole")
    file.write_bytes(content)
    return str(file)


class Refuses(pickle.Unpickler):
    """An unpickler without classes. The snapshots that are written here need none."""

    def find_class(self, module: str, name: str) -> Any:
        """Raise an error for every class."""
        raise pickle.UnpicklingError(f"{module}.{name}")


KINDS = {
    "trace": lambda: Kind(
        suffix=".json",
        originals=[small_gpu_trace().text(), cpu_trace()],
        values=json.loads,
        text=as_json,
        commands=lambda path: [["trace", "show", str(path)]],
        share=0.3,
    ),
    "trace, copied for torch-tb-profiler": lambda: Kind(
        suffix=".pt.trace.json",
        originals=[small_gpu_trace().text(), cpu_trace()],
        values=json.loads,
        text=as_json,
        commands=lambda path: [
            ["trace", "compat", str(path.parent)],
            ["trace", "show", str(place(path))],
        ],
        share=0.1,
    ),
    "trace, merged": lambda: Kind(
        suffix=".pt.trace.json",
        originals=[small_gpu_trace().text(), cpu_trace()],
        values=json.loads,
        text=as_json,
        commands=lambda path: [
            ["trace", "merge", str(path.parent)],
            ["trace", "show", str(path.parent / MERGED)],
        ],
        share=0.1,
    ),
    "snapshot": lambda: Kind(
        suffix=".pickle",
        originals=[
            pickle.dumps(PLANTED[name][0]().snapshot())
            for name in ("outputs in a list", "logits", "fragments")
        ],
        values=lambda text: Refuses(io.BytesIO(text)).load(),
        text=pickle.dumps,
        commands=lambda path: [["memory", str(path), "--hardware", "NVIDIA H100 80GB HBM3"]],
        share=0.3,
    ),
    "snapshot, with its run's profile": lambda: Kind(
        suffix=".pickle",
        originals=[step_and_profile()[0]],
        values=lambda text: Refuses(io.BytesIO(text)).load(),
        text=pickle.dumps,
        commands=lambda path: [
            ["memory", str(path), "--profile", beside(path, step_and_profile()[1])]
        ],
        share=0.15,
    ),
    "profile, of a snapshot's run": lambda: Kind(
        suffix=".profile.json",
        originals=[step_and_profile()[1]],
        values=json.loads,
        text=as_json,
        commands=lambda path: [
            ["memory", beside(path, step_and_profile()[0]), "--profile", str(path)]
        ],
        share=0.15,
        may_lack=True,
    ),
    "table of chips": lambda: Kind(
        suffix=".toml",
        originals=[CHIP.encode()],
        values=lambda text: tomllib.loads(text.decode()),
        text=toml,
        commands=lambda path: [["hardware", str(path)]],
        share=0.15,
        may_lack=True,
    ),
    "model's configuration": lambda: Kind(
        suffix=".json",
        originals=[as_json(MODEL)],
        values=json.loads,
        text=as_json,
        commands=lambda path: [["estimate", str(path), "--batch", "1", "--seq", "4"]],
        share=0.05,
        may_lack=True,
    ),
    "DeepSpeed's configuration": lambda: Kind(
        suffix=".json",
        originals=[as_json(DEEPSPEED)],
        values=json.loads,
        text=as_json,
        commands=lambda path: [["deepspeed", str(path)]],
        share=0.05,
        may_lack=True,
    ),
}


def damaged_bytes(text: bytes, chance: random.Random) -> bytes:
    """Damage one to three places of a file.

    At each place bytes are replaced, removed, repeated or inserted, or the file ends there.
    """
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(text) or 1)
        length = chance.choice([1, 1, 2, 8, 60])
        before = text[:at]
        after = text[at + length :]
        match chance.randrange(5):
            case 0:
                text = before + bytes(chance.randrange(256) for _ in range(length)) + after
            case 1:
                text = before + after
            case 2:
                text = before + text[at : at + length] + text[at:]
            case 3:
                inserted = chance.choice([b'"', b"{", b"]", b"\\", b"\xff", b"null", b"-", b"9"])
                text = before + inserted + text[at:]
            case _:
                text = text[: max(at, 1)]
    return text


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value inside a value, as a tuple of keys and indices."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def damaged_value(value: Any, chance: random.Random) -> tuple[Any, str]:
    """Return a copy in which one value is damaged, and a description of the damage.

    The value is removed, replaced by another number, by `None`, or by a value of another type. The
    description is empty if the file may still be valid.
    """
    value = copy.deepcopy(value)
    *above, last = chance.choice(list(places(value)))
    holder = value
    for key in above:
        holder = holder[key]
    old = holder[last]
    match chance.randrange(4):
        case 0:
            del holder[last]
            # A shorter list is valid.
            return value, "" if isinstance(last, int) else f"without {last}"
        case 1 if isinstance(old, int | float) and not isinstance(old, bool):
            holder[last] = chance.choice([0, 1, old + 1, old * 7])
            return value, ""
        case 2:
            holder[last] = None
        case _:
            holder[last] = chance.choice([each for each in OTHER_TYPES if _other_type(each, old)])
    # In the traces of torch, the id of some processes is a text.
    is_valid = last in {"pid", "tid"} and isinstance(holder[last], str)
    return value, "" if is_valid else f"{last} is {type(holder[last]).__name__}"


def _other_type(new: Any, old: Any) -> bool:
    """Return True if two values have different types; int and float count as the same type."""
    both_numbers = {type(new), type(old)} <= {int, float}
    return type(new) is not type(old) and not both_numbers


class Outcome(NamedTuple):
    """The result of a command.

    Attributes:
        status: The exit status; `None` if the command raised an exception.
        out: The text on stdout.
        err: The text on stderr.
        trace: The exception and the place where it was raised; empty if there was none.
    """

    status: int | None
    out: str
    err: str
    trace: str


def run(commands: list[list[str]]) -> Outcome:
    """Run commands in order, and return one outcome for all of them.

    If all succeed, `out` contains the output of all. Otherwise the outcome is that of the first
    command that does not succeed.
    """
    outcomes = []
    for command in commands:
        outcomes.append(run_one(command))
        if outcomes[-1].status != 0:
            return outcomes[-1]
    return outcomes[-1]._replace(out="".join(each.out for each in outcomes))


def run_one(arguments: list[str]) -> Outcome:
    """Run one command in this process. After `LONGEST` seconds it ends with a `TimeoutError`."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    status = None
    trace = ""

    def late(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {LONGEST} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST)
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            status = deepspeed(arguments[1]) if arguments[0] == "deepspeed" else shell(arguments)
    except BaseException as error:
        # The search is for commands that raise an exception of any kind.
        trace = f"{type(error).__name__}: {error} @ {traceback.extract_tb(error.__traceback__)[-1]}"
        if isinstance(error, KeyboardInterrupt):
            raise
    finally:
        signal.alarm(0)
    return Outcome(status, _written(out), _written(err), trace)


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode()  # type: ignore[attr-defined]


def deepspeed(path: str) -> int:
    """Read a configuration as `FlopsMonitor.from_deepspeed` does, and print like a command."""
    try:
        arguments = arguments_of(path)[0]
        print({key: value for key, value in arguments.items() if key != "schedule"})  # noqa: T201
    except LflopsError as error:
        print(f"lflops: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


def figures(text: str, path: Path) -> str:
    """Return an output without the file's name, repeated spaces, and the line of the date."""
    without_names = text.replace(path.name, "").replace(str(path.parent), "")
    lines = [" ".join(line.split()) for line in without_names.splitlines()]
    return "\n".join(line for line in lines if not line.startswith("created "))


def impossible(text: str) -> str:
    """Return the first impossible number in an output, or an empty text if there is none.

    A number is impossible if it is a negative amount, NaN, infinite, or a share above 100 %.
    """
    found = re.search(
        r"(?<![\w.])-\d[\d.,]*\s*(?:[KMGT]i?B|B|ns|µs|ms|s|%)(?!\w)|\bnan\b|\binf\b", text
    )
    if found:
        return found[0]
    shares = [float(each) for each in re.findall(r"(?<![\w.])(\d+\.\d) %", text)]
    for share in shares:
        # The shares of a table are rounded, so they may add up to a little more than 100 %.
        if share > 100.05:
            return f"{share} %"
    return ""


def is_less(shown: str, original: str) -> bool:
    """Return True if each shown line is an original line, possibly without some of its words."""
    lines = [line.split() for line in original.splitlines()]

    def is_part(words: list[str], line: list[str]) -> bool:
        # `in` consumes the iterator, so the words have to come in the same order.
        rest = iter(line)
        return all(word in rest for word in words)

    for line in shown.splitlines():
        words = line.split()
        if not any(is_part(words, each) for each in lines):
            return False
    return True


REMARKED = re.compile(r"left out|not read|no launch|not counted|cannot|unknown|clock|no stack")
"""Words of a remark that a part of the file could not be read."""


def judge(outcome: Outcome, original: str, damage: str, path: Path) -> tuple[str, str]:
    """Classify the outcome of reading a damaged file.

    Args:
        outcome: The result of the commands.
        original: The figures that the commands print for the undamaged file.
        damage: A description of the damage; empty if the file may still be valid.
        path: The damaged file.

    Returns:
        One of the results in the docstring of this module; and the reason if it is a defect,
        otherwise an empty text.
    """
    if outcome.trace or outcome.status not in {0, 2}:
        return "traceback", outcome.trace or f"status {outcome.status}: {outcome.err}"
    if outcome.status == 2:
        return _judge_refusal(outcome)
    shown = figures(outcome.out, path)
    wrong = impossible(shown)
    new = set(shown.splitlines()) - set(original.splitlines())
    if shown == original:
        return "same", ""
    if not wrong and is_less(shown, original):
        return "less", ""
    if not wrong and any(REMARKED.search(line) for line in new):
        return "remarked", ""
    reason = wrong or damage
    return "silent" if reason else "other", reason


def _judge_refusal(outcome: Outcome) -> tuple[str, str]:
    """Check that a refusal is one line on stderr, which shows no bytes as Python prints them."""
    lines = outcome.err.strip().splitlines()
    is_one_clear_line = (
        len(lines) == 1
        and lines[0].startswith("lflops: ")
        and not re.search(r"\bb'", lines[0])
        and not outcome.out
    )
    if is_one_clear_line:
        return "refused", ""
    return "traceback", f"not one line: {outcome.err!r} {outcome.out[:80]!r}"


class Damaged(NamedTuple):
    """A damaged file, and the result of reading it.

    Attributes:
        number: The number of the file.
        status: The class that `judge` returned.
        why: The reason, if it is a defect.
        content: The damaged file.
    """

    number: int
    status: str
    why: str
    content: bytes


def outcomes(name: str, files: int, seed: int, folder: Path) -> Iterator[Damaged]:
    """Damage files of one kind, read each one with its commands, and classify the result.

    Args:
        name: The kind, a key of `KINDS`.
        files: Number of damaged files of all kinds together. This kind has its `share` of them.
        seed: Seed of the damage.
        folder: Where the files are written.
    """
    kind = KINDS[name]()
    chance = random.Random(f"{seed} {name}")  # noqa: S311 - the damage must be reproducible
    path = folder / f"damaged{kind.suffix}"
    bases = []
    for text in kind.originals:
        path.write_bytes(text)
        whole = run(kind.commands(path))
        if whole.status != 0:
            raise ValueError(f"the undamaged {name} cannot be read: {whole}")
        bases.append((text, kind.values(text), figures(whole.out, path)))
    for number in range(round(files * kind.share)):
        text, value, original = chance.choice(bases)
        if chance.random() < 0.4:
            content = damaged_bytes(text, chance)
            damage = ""
        else:
            changed, damage = damaged_value(value, chance)
            is_missing = damage.startswith("without")
            if is_missing and (kind.may_lack or damage.endswith("Concrete Inputs")):
                damage = ""
            content = kind.text(changed)
        path.write_bytes(content)
        status, why = judge(run(kind.commands(path)), original, damage, path)
        yield Damaged(number, status, why, content)
