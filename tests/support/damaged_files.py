"""Damage files with a seed: traces, snapshots, profiles, tables of chips, configurations.

The damage is in the bytes of a file, or in one of its values. Each file is read by a command, as a
user would do. The possible results are:

- refused: exit status 2 and one line
- remarked: the file is read, and the output reports that something is left out
- same: the file is read, and every number is equal to the number of the undamaged file
- less: like `same`, but some numbers are missing
- other: the file is read, with the numbers that it now contains, for example if a digit or the name
  of a kernel was changed

A result *other* is a silent wrong number if the damaged value cannot be valid: it has another type,
it is missing, or it is impossible, such as a negative size or a part that is larger than its whole.
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

LONGEST = 30  # seconds for a file
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
    """Files of one kind."""

    suffix: str
    originals: list[bytes]
    values: Callable[[bytes], Any]  # what is in a file
    text: Callable[[Any], bytes]
    commands: Callable[[Path], list[list[str]]]  # one after the other, until one refuses
    share: float
    may_lack: bool = False  # whether a file without one of its keys is as good a file


def cpu_trace() -> bytes:
    """Of a small model, with shapes and memory."""
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    with tempfile.TemporaryDirectory() as folder:
        with profile(
            activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True
        ) as recorder:
            second(checkpoint(first, torch.randn(4, 8), use_reentrant=False)).sum().backward()
        recorder.export_chrome_trace(f"{folder}/trace.json")
        return Path(folder, "trace.json").read_bytes()


def toml(value: Any) -> bytes:
    """Tables of one level with lists of tables, which is all that a table of chips has."""
    if not isinstance(value, dict):
        return f"value = {inline(value)}\n".encode()
    lines = []
    for vendor, chips in value.items():
        for chip in chips if isinstance(chips, list) else [chips]:
            lines += (
                [
                    f"[[{json.dumps(vendor)}]]",
                    *(f"{json.dumps(key)} = {inline(each)}" for key, each in chip.items()),
                ]
                if isinstance(chip, dict)
                else [f"{json.dumps(vendor)} = {inline(chips)}"]
            )
    return "\n".join(lines).encode()


def inline(value: Any) -> str:
    """A value of TOML on one line."""
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(key)} = {inline(each)}" for key, each in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return (
        str(value)
        if type(value).__name__ == "date"
        else "nan"
        if value is None
        else as_json(value).decode()
    )


def as_json(value: Any) -> bytes:
    """JSON, also of an integer with more digits than Python prints."""
    return re.sub(
        rb'"\\u0000(\d+)"',
        lambda found: b"1" + b"0" * int(found[1]),
        json.dumps(_marked(value)).encode(),
    )


def _marked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _marked(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(each) for each in value]
    return "\0" + "5000" if type(value) is int and value == 10**5000 else value


@functools.cache
def step_and_profile() -> tuple[bytes, bytes]:
    """A step of a small model as the allocator would have recorded it, by the operators of its profile; and that profile."""
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
    """A whole file next to the damaged one."""
    file = path.with_name("whole")
    file.write_bytes(content)
    return str(file)


class Refuses(pickle.Unpickler):
    """The benchmark's own files have no classes either."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse."""
        raise pickle.UnpicklingError(f"{module}.{name}")


KINDS = {
    "trace": lambda: Kind(
        ".json",
        [small_gpu_trace().text(), cpu_trace()],
        json.loads,
        as_json,
        lambda path: [["trace", "show", str(path)]],
        0.3,
    ),
    "trace, copied for torch-tb-profiler": lambda: Kind(
        ".pt.trace.json",
        [small_gpu_trace().text(), cpu_trace()],
        json.loads,
        as_json,
        lambda path: [["trace", "compat", str(path.parent)], ["trace", "show", str(place(path))]],
        0.1,
    ),
    "trace, merged": lambda: Kind(
        ".pt.trace.json",
        [small_gpu_trace().text(), cpu_trace()],
        json.loads,
        as_json,
        lambda path: [
            ["trace", "merge", str(path.parent)],
            ["trace", "show", str(path.parent / MERGED)],
        ],
        0.1,
    ),
    "snapshot": lambda: Kind(
        ".pickle",
        [
            pickle.dumps(PLANTED[name][0]().snapshot())
            for name in ("outputs in a list", "logits", "fragments")
        ],
        lambda text: Refuses(io.BytesIO(text)).load(),
        pickle.dumps,
        lambda path: [["memory", str(path), "--hardware", "NVIDIA H100 80GB HBM3"]],
        0.3,
    ),
    "snapshot, with its run's profile": lambda: Kind(
        ".pickle",
        [step_and_profile()[0]],
        lambda text: Refuses(io.BytesIO(text)).load(),
        pickle.dumps,
        lambda path: [["memory", str(path), "--profile", beside(path, step_and_profile()[1])]],
        0.15,
    ),
    "profile, of a snapshot's run": lambda: Kind(
        ".profile.json",
        [step_and_profile()[1]],
        json.loads,
        as_json,
        lambda path: [["memory", beside(path, step_and_profile()[0]), "--profile", str(path)]],
        0.15,
        may_lack=True,
    ),
    "table of chips": lambda: Kind(
        ".toml",
        [CHIP.encode()],
        lambda text: tomllib.loads(text.decode()),
        toml,
        lambda path: [["hardware", str(path)]],
        0.15,
        may_lack=True,
    ),
    "model's configuration": lambda: Kind(
        ".json",
        [as_json(MODEL)],
        json.loads,
        as_json,
        lambda path: [["estimate", str(path), "--batch", "1", "--seq", "4"]],
        0.05,
        may_lack=True,
    ),
    "DeepSpeed's configuration": lambda: Kind(
        ".json",
        [as_json(DEEPSPEED)],
        json.loads,
        as_json,
        lambda path: [["deepspeed", str(path)]],
        0.05,
        may_lack=True,
    ),
}


def damaged_bytes(text: bytes, chance: random.Random) -> bytes:
    """One to three places where bytes are other ones, gone, twice there, or the end."""
    for _ in range(chance.randint(1, 3)):
        at, length = chance.randrange(len(text) or 1), chance.choice([1, 1, 2, 8, 60])
        match chance.randrange(5):
            case 0:
                text = (
                    text[:at]
                    + bytes(chance.randrange(256) for _ in range(length))
                    + text[at + length :]
                )
            case 1:
                text = text[:at] + text[at + length :]
            case 2:
                text = text[:at] + text[at : at + length] + text[at:]
            case 3:
                text = (
                    text[:at]
                    + chance.choice([b'"', b"{", b"]", b"\\", b"\xff", b"null", b"-", b"9"])
                    + text[at:]
                )
            case _:
                text = text[: max(at, 1)]
    return text


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value has values."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (*path, key)
            yield from places(value[key], (*path, key))


def damaged_value(value: Any, chance: random.Random) -> tuple[Any, str]:
    """One value that is missing, of another type, or another of its type; and which of these."""
    value = copy.deepcopy(value)
    *above, last = chance.choice(list(places(value)))
    holder = value
    for key in above:
        holder = holder[key]
    old = holder[last]
    match chance.randrange(4):
        case 0:
            del holder[last]
            return value, "" if isinstance(
                last, int
            ) else f"without {last}"  # a list may be shorter
        case 1 if isinstance(old, int | float) and not isinstance(old, bool):
            holder[last] = chance.choice([0, 1, old + 1, old * 7])
            return value, ""
        case 2:
            holder[last] = None
        case _:
            holder[last] = chance.choice(
                [
                    each
                    for each in OTHER_TYPES
                    if type(each) is not type(old) and not {type(each), type(old)} <= {int, float}
                ]
            )
    is_fine = last in {"pid", "tid"} and isinstance(
        holder[last], str
    )  # torch itself gives some processes a text
    return value, "" if is_fine else f"{last} is {type(holder[last]).__name__}"


class Outcome(NamedTuple):
    """What came of a command."""

    status: int | None
    out: str
    err: str
    trace: str


def run(commands: list[list[str]]) -> Outcome:
    """What came of all, or of the first that refuses.

    What those before it have printed is no answer then.
    """
    outcomes = []
    for command in commands:
        outcomes.append(run_one(command))
        if outcomes[-1].status != 0:
            return outcomes[-1]
    return outcomes[-1]._replace(out="".join(each.out for each in outcomes))


def run_one(arguments: list[str]) -> Outcome:
    """A command within the time."""
    out, err = (
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)
    )
    status, trace = None, ""

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
    except BaseException as error:  # what is looked for
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
    """`FlopsMonitor.from_deepspeed` reads it."""
    try:
        print({key: value for key, value in arguments_of(path)[0].items() if key != "schedule"})  # noqa: T201
    except LflopsError as error:
        print(f"lflops: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


def figures(text: str, path: Path) -> str:
    """The output without the file's name and the time of day."""
    lines = (
        " ".join(line.split())
        for line in text.replace(path.name, "").replace(str(path.parent), "").splitlines()
    )
    return "\n".join(line for line in lines if not line.startswith("created "))


def impossible(text: str) -> str:
    """A number that can be none."""
    found = re.search(
        r"(?<![\w.])-\d[\d.,]*\s*(?:[KMGT]i?B|B|ns|µs|ms|s|%)(?!\w)|\bnan\b|\binf\b", text
    )
    shares = [float(each) for each in re.findall(r"(?<![\w.])(\d+\.\d) %", text)]
    return found[0] if found else next((f"{each} %" for each in shares if each > 100.05), "")


def is_less(shown: str, original: str) -> bool:
    """Whether each line is one of the whole file's without some of its words."""
    lines = [line.split() for line in original.splitlines()]

    def is_part(words: list[str], line: list[str]) -> bool:
        rest = iter(line)
        return all(word in rest for word in words)

    return all(any(is_part(line.split(), each) for each in lines) for line in shown.splitlines())


REMARKED = re.compile(r"left out|not read|no launch|not counted|cannot|unknown|clock|no stack")


def judge(outcome: Outcome, original: str, damage: str, path: Path) -> tuple[str, str]:
    """What came of it, and what is wrong with that."""
    if outcome.trace or outcome.status not in {0, 2}:
        return "traceback", outcome.trace or f"status {outcome.status}: {outcome.err}"
    if outcome.status == 2:
        lines = outcome.err.strip().splitlines()
        told = (
            len(lines) == 1
            and lines[0].startswith("lflops: ")
            and not re.search(r"\bb'", lines[0])
            and not outcome.out
        )
        return (
            ("refused", "")
            if told
            else ("traceback", f"not one line: {outcome.err!r} {outcome.out[:80]!r}")
        )
    shown = figures(outcome.out, path)
    wrong = impossible(shown)
    new = set(shown.splitlines()) - set(original.splitlines())
    if shown == original:
        return "same", ""
    if not wrong and is_less(shown, original):
        return "less", ""
    if not wrong and any(REMARKED.search(line) for line in new):
        return "remarked", ""
    return ("silent", wrong or damage) if wrong or damage else ("other", "")


class Damaged(NamedTuple):
    """One damaged file and what a command made of it."""

    number: int
    status: str
    why: str
    content: bytes


def outcomes(name: str, files: int, seed: int, folder: Path) -> Iterator[Damaged]:
    """Damage this kind's share of so many files, read each with its command, and judge what came of it."""
    kind = KINDS[name]()
    chance = random.Random(f"{seed} {name}")  # noqa: S311 - to be the same each time
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
            content, damage = damaged_bytes(text, chance), ""
        else:
            changed, damage = damaged_value(value, chance)
            is_missing = damage.startswith("without")
            if is_missing and (kind.may_lack or damage.endswith("Concrete Inputs")):
                damage = ""
            content = kind.text(changed)
        path.write_bytes(content)
        status, why = judge(run(kind.commands(path)), original, damage, path)
        yield Damaged(number, status, why, content)
