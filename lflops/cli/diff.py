"""`lflops diff`: two runs compared, and limits that a build can hold the second one to."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from lflops.analysis.analysis import analyze
from lflops.analysis.compare.diff import Limit, compare, limits
from lflops.cli.output import BYTES, UsageError, draw, help_of, write_json
from lflops.extras import needed
from lflops.report.diff import headline
from lflops.report.explanation import fault_changes, fault_lines, profile_at
from lflops.report.terminal.diff import render_diff
from lflops.trace.files import is_trace

HELP = help_of(__file__)


def diff(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help=HELP["before"])],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help=HELP["after"])],
    *,
    max_regress: Annotated[
        str | None, typer.Option(metavar="SHARE", help=HELP["max_regress"])
    ] = None,
    min_mfu: Annotated[str | None, typer.Option(metavar="SHARE", help=HELP["min_mfu"])] = None,
    max_memory: Annotated[str | None, typer.Option(metavar="SIZE", help=HELP["max_memory"])] = None,
    strict: Annotated[bool, typer.Option("--strict", help=HELP["strict"])] = False,
    everything: Annotated[bool, typer.Option("--all", help=HELP["everything"])] = False,
    as_json: Annotated[bool, typer.Option("--json", help=HELP["as_json"])] = False,
) -> int:
    """Compare two runs, module by module. Exit status 1: a limit that was set is broken.

    Where no one can tell, because the machine was busy or the steps vary too much, the status is 0
    and the output says so.
    """
    regress, mfu = _share("--max-regress", max_regress), _share("--min-mfu", min_mfu)
    # an invalid size is reported before files are read
    memory_limit(max_memory, 0)
    if is_trace(before) and is_trace(after):
        diff_traces = needed("diff_traces", "comparing traces")
        return int(
            diff_traces(
                before, after, regress, mfu, max_memory, everything=everything, as_json=as_json
            )
        )
    first, second = analyze(profile_at(before)), analyze(profile_at(after))
    compared, faults = compare(first.compared, second.compared).diff, fault_changes(first, second)
    checked = limits(
        compared,
        max_regress=regress,
        min_mfu=mfu,
        max_memory=memory_limit(max_memory, compared.peak_bytes.before),
    )
    refuse_unknown(checked, HELP)
    if as_json:
        fields = {field: getattr(compared, field) for field in compared.__struct_fields__}
        write_json(
            {
                "status": compared.status,
                "headline": headline(compared),
                "faults": faults,
                "limits": checked,
            }
            | fields
        )
    else:
        draw(render_diff(compared, checked, fault_lines(faults), everything=everything))
    return int(any(limit.broken or (strict and limit.doubt) for limit in checked))


def refuse_unknown(checked: Iterable[Limit], reasons: Mapping[str, str]) -> None:
    """Raise for a limit of which no one can tell whether it is broken, with the reason in the help of the command."""
    for limit in checked:
        if limit.broken is None and limit.doubt is None:
            raise UsageError(
                f"--{limit.name.replace('_', '-')}: {reasons[f'unknown_{limit.name}']}"
            )


def _share(option: str, given: str | None) -> float | None:
    """A share of 1, of `3%` or `0.03`."""
    if given is None:
        return None
    number = _number(given.removesuffix("%"))
    share = None if number is None else number / 100 if given.endswith("%") else number
    if share is None or (share > 1 and not given.endswith("%")):
        raise UsageError(f"{option}={given!r}: give a share, as 3% or 0.03")
    return share


def memory_limit(given: str | None, before: float | None) -> float | None:
    """Bytes, of a size or of what the first run had and may be added to it."""
    if given is None:
        return None
    if given.endswith("%"):
        if before is None:
            raise UsageError(
                f"--max-memory={given!r}: the first run has no peak of memory, give a size, as 24GiB"
            )
        return before * (1 + (_share("--max-memory", given) or 0))
    parts = re.fullmatch(r"(.*?)\s*([kKMGT]?i?B|)", given.strip())
    number = _number(parts[1]) if parts else None
    if number is not None and parts and not parts[2]:
        raise UsageError(
            f"--max-memory={given!r} has no unit: give {parts[1]}GiB, {parts[1]}GB or, as a growth, {parts[1]}%"
        )
    if parts is None or number is None or parts[2] not in BYTES:
        raise UsageError(
            f"--max-memory={given!r}: give a size, as 24GiB or 24GB, or a growth, as 5%"
        )
    return number * float(BYTES[parts[2]])


def _number(given: str) -> float | None:
    """A number of 0 or more; `float` also takes forms such as `1_000` and `nan`."""
    return float(given) if re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)(e\d+)?\s*", given) else None
