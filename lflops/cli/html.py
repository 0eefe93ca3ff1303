"""`lflops html`: a profile, or several, as one file that a browser opens, without a network."""

from pathlib import Path
from typing import Annotated

import typer

from lflops.analyze.analysis import analyze
from lflops.cli.output import UsageError, help_of, write_json
from lflops.profile.json_file import load
from lflops.report.html import page, write
from lflops.report.payload.payload import payload

HELP = help_of(__file__)


def html(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help=HELP["files"])],
    *,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="OUT", help=HELP["out"])] = None,
    as_json: Annotated[bool, typer.Option("--json", help=HELP["as_json"])] = False,
) -> None:
    """Write a profile, or several to compare, as one HTML file: it opens from disk, and in a mail or a ticket."""
    if as_json and out is not None:
        raise UsageError(f"out={str(out)!r}: --json writes no page, give one of the two")
    path = files[-1].with_suffix(".html" if len(files) == 1 else ".compare.html") if out is None else out
    if path.resolve() in {file.resolve() for file in files}:
        raise UsageError(f"out={str(path)!r} is a profile itself: give another place with --out")
    analyses = [analyze(load(file)) for file in files]
    if as_json:
        shown = [payload(analysis) for analysis in analyses]
        write_json(shown[0] if len(shown) == 1 else shown)
    else:
        write(page(*analyses, names=_distinct_names(files) if len(files) > 1 else ()), path)
        typer.echo(path)


def _distinct_names(files: list[Path]) -> list[str]:
    names = [file.name for file in files]
    paths = names if len(set(names)) == len(names) else [str(file) for file in files]
    return [path if paths.index(path) == i else f"{path} ({i + 1})" for i, path in enumerate(paths)]
