"""`lflops diff`: compare two runs, and check the second run against limits."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from lflops.analysis.analysis import analyze
from lflops.analysis.compare.diff import Limit, compare, limits
from lflops.cli.output import BYTES, UsageError, draw, write_json
from lflops.extras import needed
from lflops.report.diff import headline
from lflops.report.explanation import issue_changes, issue_lines, profile_at
from lflops.report.terminal.diff import render_diff
from lflops.trace.files import is_trace

# Error texts for limits that cannot be checked because a value is unknown.
_UNKNOWN = {
    "unknown_max_regress": "cannot be checked: each run needs at least two unprofiled steps",
    "unknown_min_mfu": (
        "cannot be checked: the second run has no MFU, because its step times or the peak FLOP/s "
        "of its chip are unknown"
    ),
    "unknown_max_memory": "cannot be checked: the peak memory of the second run is unknown",
}

_JSON = (
    "Print one JSON object. For two profiles, its keys are status, headline, issues, limits, "
    "facts, whole, step, phases, mfu, samples_per_second, tokens_per_second, peak_bytes, "
    "unreliable, cpu_lost and modules. `status` is the verdict on the step time: slower, faster, "
    "same or cannot tell. `headline` is a list of sentences. Each of the `issues` is new, still "
    "there, gone, or cannot tell. `facts` are the circumstances that differ between the runs. "
    "`whole` is the change of all modules together. Each of the `modules` has self and inclusive "
    "figures, before and after. For two traces, the keys are headline, limits, window, step, mfu, "
    "states, idle, categories, operators, kernels and more. Unknown values are null."
)


def diff(
    before: Annotated[
        Path,
        typer.Argument(
            metavar="BEFORE",
            help="The first run: a profile's JSON file, a trace of torch.profiler, or the folder "
            "of a training run. If it is a folder, the profile of its last window is read.",
        ),
    ],
    after: Annotated[
        Path,
        typer.Argument(
            metavar="AFTER",
            help="The second run. The limits apply to this run. If BEFORE is a trace, AFTER must "
            "be a trace too.",
        ),
    ],
    *,
    max_regress: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Maximum slowdown of the step, for example 3%. A slowdown that may be noise "
            "passes too.",
        ),
    ] = None,
    min_mfu: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Minimum MFU, for example 0.35 or 35%."),
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Maximum peak of live memory, for example 24GiB or 24GB. A share, for example 5%, "
            "limits how much the peak may grow.",
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Also exit with status 1 if a limit cannot be checked because of noise.",
        ),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="List all modules, including unchanged modules.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help=_JSON)] = False,
) -> int:
    """Compare two runs, module by module. The exit status is 1 if a limit is violated.

    If a limit cannot be checked because the machine was busy or the steps vary too much, the exit
    status is 0, and the output says so.
    """
    regress = _share("--max-regress", max_regress)
    mfu = _share("--min-mfu", min_mfu)
    # An invalid size is reported before files are read.
    memory_limit(max_memory, 0)
    if is_trace(before) and is_trace(after):
        diff_traces = needed("diff_traces", "comparing traces")
        return int(
            diff_traces(
                before, after, regress, mfu, max_memory, everything=everything, as_json=as_json
            )
        )
    first = analyze(profile_at(before))
    second = analyze(profile_at(after))
    compared = compare(first.compared, second.compared).diff
    issues = issue_changes(first, second)
    checked = limits(
        compared,
        max_regress=regress,
        min_mfu=mfu,
        max_memory=memory_limit(max_memory, compared.peak_bytes.before),
    )
    refuse_unknown(checked, _UNKNOWN)
    if as_json:
        shown = {
            "status": compared.status,
            "headline": headline(compared),
            "issues": issues,
            "limits": checked,
        }
        shown |= {field: getattr(compared, field) for field in compared.__struct_fields__}
        write_json(shown)
    else:
        draw(render_diff(compared, checked, issue_lines(issues), everything=everything))
    return int(any(limit.is_broken or (strict and limit.caveat) for limit in checked))


def refuse_unknown(checked: Iterable[Limit], reasons: Mapping[str, str]) -> None:
    """Raise an error if a limit cannot be checked because a value, such as the MFU, is unknown.

    A limit that cannot be checked because of noise has a caveat, and raises no error. `reasons`
    contains the error texts. Its keys are `unknown_` and the name of a limit, such as
    `unknown_min_mfu`.
    """
    for limit in checked:
        if limit.is_broken is None and limit.caveat is None:
            option = limit.name.replace("_", "-")
            raise UsageError(f"--{option} {reasons[f'unknown_{limit.name}']}")


def _share(option: str, given: str | None) -> float | None:
    """Parse a share such as `3%` or `0.03`."""
    if given is None:
        return None
    is_percent = given.endswith("%")
    number = _number(given.removesuffix("%"))
    if number is None or (number > 1 and not is_percent):
        raise UsageError(f"{option}={given!r}: pass a share, such as 3% or 0.03")
    return number / 100 if is_percent else number


def memory_limit(given: str | None, before: float | None) -> float | None:
    """Return the bytes that `given`, the value of `--max-memory`, allows.

    `given` is a size such as `24GiB`, or an increase such as `5%` over the peak of the first run.
    `before` is this peak in bytes.
    """
    if given is None:
        return None
    if given.endswith("%"):
        if before is None:
            raise UsageError(
                f"--max-memory={given!r} limits the growth of the peak memory, but the peak memory "
                "of the first run is unknown: pass a size, such as 24GiB"
            )
        return before * (1 + (_share("--max-memory", given) or 0))
    parts = re.fullmatch(r"(.*?)\s*([kKMGT]?i?B|)", given.strip())
    number = None if parts is None else _number(parts[1])
    if parts is not None and number is not None:
        if not parts[2]:
            raise UsageError(
                f"--max-memory={given!r} has no unit: pass a size, such as {parts[1]}GiB or "
                f"{parts[1]}GB, or a growth, such as {parts[1]}%"
            )
        if parts[2] in BYTES:
            return number * float(BYTES[parts[2]])
    raise UsageError(
        f"--max-memory={given!r}: pass a size, such as 24GiB or 24GB, or a growth, such as 5%"
    )


def _number(given: str) -> float | None:
    """Parse a number that is at least 0; return `None` for any other text.

    The text is checked first because `float` also accepts forms such as `1_000` and `nan`.
    """
    if not re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)(e\d+)?\s*", given):
        return None
    return float(given)
