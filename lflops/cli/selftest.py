"""`lflops selftest`: tries lflops on a user's device, and writes one file that can be sent."""

from pathlib import Path
from typing import Annotated

import typer
from msgspec import json

from lflops.cli.output import write_lines


def selftest(
    *,
    device: Annotated[str | None, typer.Option("--device", help="As torch names it; by default the accelerator, or else the CPU.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file that is written.")] = Path("lflops-selftest.json"),
) -> None:
    """Try out what works on a device, and write it to a file. The exit status is 1 if something is wrong."""
    from lflops.collect.selftest import self_test  # with torch, which no other command waits for

    result = self_test(device)
    output.write_bytes(json.format(json.encode(result)) + b"\n")
    words = {True: "right", False: "WRONG", None: "not offered"}
    write_lines([f"{result.device_name} ({result.device}), torch {result.torch}"])
    write_lines([f"  {check.name:<16}{words[check.passed]:<13}{check.found}" for check in result.checks])
    write_lines([f"written: {output}"])
    if not result.passed:
        raise typer.Exit(1)
