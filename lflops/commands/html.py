"""`lflops html`: a profile as one file that a browser opens, without a network."""

from pathlib import Path
from typing import Annotated

import typer

from lflops.commands.output import UsageError, write_json
from lflops.profile_file import load
from lflops.report.page import save
from lflops.report.payload import payload

__all__ = ["html"]


def html(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile's JSON file.")],
    *,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="OUT", help="The page; else FILE with .html for .json.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write no page, and print what it would draw as one JSON object. Unknown is null.")
    ] = False,
) -> None:
    """Write a profile as one HTML file: it opens from disk, and in a mail or a ticket."""
    if as_json and out is not None:
        raise UsageError(f"out={str(out)!r}: --json writes no page, give one of the two")
    page = file.with_suffix(".html") if out is None else out
    if page.resolve() == file.resolve():
        raise UsageError(f"out={str(page)!r} is the profile itself: give another place with --out")
    profile = load(file)
    if as_json:
        write_json(payload(profile))
    else:
        save(profile, page)
        typer.echo(page)
