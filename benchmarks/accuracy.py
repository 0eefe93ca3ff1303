"""Compare lflops with other tools on the conformance cases: who gets the MACs right.

MACs of forward and of backward are compared separately. Each tool runs each case in a separate
process, forked from a process that has imported all tools. Some tools leave torch patched after an
error, which would make the next case wrong.
"""

import argparse
import importlib.metadata
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from peers import TOOLS, Tool, load, quiet
from results import record

from tests.conformance import CASES
from tests.conformance.case import Case

Found = dict[str, int | str]
"""MACs by phase. The key `error` contains the name of an exception instead."""

TOLD = "an operator with a formula of its own"
"""Name of a case that is left out.

Its operator has a custom formula, which lflops receives and the other tools cannot receive.
"""

NEAR = 0.01
RIGHT, WITHIN, POINTWISE, WRONG, NONE = KINDS = (
    "right",
    f"within {100 * NEAR:.0f} %",
    "pointwise",
    "wrong",
    "none",
)
CONVENTIONS = f"""
What MACs are is lflops's definition: a complex product is four real ones, a sparse matrix multiplies what it stores, quantized and fused
kernels cost what they stand for, packed sequences are a square each. *{RIGHT.capitalize()}* is exact. Every tool is taken at its own word:
what fvcore calls FLOPs are MACs, two of FlopCounterMode's are one; of fvcore's operators only those that multiply and accumulate are added
up, as it tells them apart. Some tools count biases, normalisation or activations as MACs. That is a convention and no mistake, so it has a
column of its own: *{POINTWISE}* is above by no more than the pointwise work of the case, as lflops counts it in FLOPs.
*{NONE.capitalize()}* is an error, in the tables by its name, or no answer.

Backward starts from ones for every floating output. A tool that does not tell recomputation from backward is right with it or without it;
lflops does, and has to get both right. DeepSpeed and calflops do not look at backward but take twice the forward: where that is so, they
are right.

This is a CPU, whose fused attention FlopCounterMode has no formula for; *with attention* it is told to take its own of CUDA's. Kernels of
packed sequences run on GPUs alone: others stand in for them, under the same names, below torch's and transformers' own functions. A tool
that takes only tensors by position is given a wrapper that keeps the rest. ptflops is given its inputs by name, for by position one of its
backends gives a mean over the batch. Functions are called by their names in torch, which is where some tools patch them, but for one case
that is about just that. Every tool meets every case in a fresh process, so that none suffers from what a failure left behind.
"""


class Verdict(NamedTuple):
    """The verdict on an answer: one of `KINDS`, and the text in the table."""

    kind: str
    text: str


Verdicts = Mapping[tuple[str, str], Verdict]
"""Verdicts by tool and case."""


def judge_forward(found: Found, case: Case, room: int) -> Verdict:
    """Compare the MACs of forward with those computed by hand.

    `room` is the pointwise work of the case, which some tools count as MACs.
    """
    return judge(found, "forward", [case.forward], room)


def judge_backward(found: Found, case: Case) -> Verdict:
    """Compare the MACs of backward with those computed by hand.

    If a tool reports recomputation separately, it is compared, too, and the worse verdict counts.
    """
    assert case.backward is not None  # noqa: S101 - only cases with backward are judged
    if "recompute" not in found:
        return judge(found, "backward", [case.backward, case.backward + case.recompute])
    both = judge(found, "backward", [case.backward]), judge(found, "recompute", [case.recompute])
    return max(both, key=lambda each: KINDS.index(each.kind))


def judge(found: Found, what: str, truths: Sequence[int], room: int = 0) -> Verdict:
    """Compare an answer with the closest of several correct values."""
    if what not in found:
        return Verdict(NONE, str(found.get("error", NONE)))
    answer = int(found[what])
    truth = min(truths, key=lambda each: abs(answer - each))
    if answer == truth:
        return Verdict(RIGHT, RIGHT)
    error = error_of(answer, truth)
    if abs(answer - truth) <= NEAR * truth:
        return Verdict(WITHIN, error)
    return (
        Verdict(POINTWISE, f"{POINTWISE}, {error}")
        if truth < answer <= truth + room
        else Verdict(WRONG, error)
    )


def error_of(answer: int, truth: int) -> str:
    """Return the error as text, in percent if the correct value is not 0."""
    if not truth:
        return f"{answer:,} for 0"
    percent = 100 * (answer / truth - 1)
    return f"{percent:+,.0f} %" if abs(percent) >= 10 else f"{percent:+.2g} %"


def answer(pipe: Connection, tool: Tool, case: Case) -> None:
    """Run one tool on one case. The process ends afterwards."""
    torch.set_num_threads(1)
    with quiet(), case.setting(), torch.set_grad_enabled(case.grad):
        try:
            for what, macs in tool.count(case):
                pipe.send((what, macs))
        except Exception as error:  # noqa: BLE001 - whatever a tool fails with is its answer
            pipe.send(("error", type(error).__name__))
    pipe.close()


def ask(jobs: Sequence[tuple[Tool, Case]], seconds: float) -> Iterator[tuple[Tool, Case, Found]]:
    """Run each job in its own forked process, and yield the results.

    As many processes run at a time as there are cores. A process is killed after `seconds`.
    """
    fork = multiprocessing.get_context("fork")
    waiting = list(reversed(jobs))
    running: dict[
        Connection, tuple[multiprocessing.process.BaseProcess, float, Tool, Case, Found]
    ] = {}
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            tool, case = waiting.pop()
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=answer, args=(theirs, tool, case))
            process.start()
            theirs.close()
            running[ours] = process, time.monotonic() + seconds, tool, case, {}
        for pipe in wait(list(running), timeout=1):
            process, _, tool, case, found = running[pipe]
            try:
                what, value = pipe.recv()
                found[what] = value
            except EOFError:
                process.join()
                if process.exitcode:
                    found.setdefault("error", "killed")
                yield tool, case, found
                del running[pipe]
        for process, end, _, _, found in running.values():
            if time.monotonic() > end and "error" not in found:
                found["error"] = "too slow"
                process.kill()


def named(tool: Tool) -> str:
    """Return the name of a tool with its version. torch's version stands above the table."""
    package = tool.module.partition(".")[0]
    return tool.name if package == "torch" else f"{tool.name} {importlib.metadata.version(package)}"


def rows(head: Sequence[object], body: Sequence[Sequence[object]]) -> list[str]:
    """Return a Markdown table, in which columns of numbers are right-aligned."""
    sides = [
        "--:" if all(isinstance(row[place], int) for row in body) else "---"
        for place in range(len(head))
    ]
    return [f"| {' | '.join(map(str, row))} |" for row in (head, sides, *body)]


def summary(verdicts: Verdicts, tools: Sequence[Tool], kinds: Sequence[str]) -> list[str]:
    """Return a table of how often each tool got each verdict."""
    tallies = [
        Counter(verdict.kind for (name, _), verdict in verdicts.items() if name == tool.name)
        for tool in tools
    ]
    return rows(
        ["tool", *kinds],
        [
            [named(tool), *(tally[kind] for kind in kinds)]
            for tool, tally in zip(tools, tallies, strict=True)
        ],
    )


def by_family(verdicts: Verdicts, cases: Sequence[Case]) -> list[str]:
    """Return a table of how many forwards each tool counts correctly, by family of cases.

    Answers that follow another convention are correct here.
    """
    table = []
    for family in dict.fromkeys(case.family for case in cases):
        members = [case.name for case in cases if case.family == family]
        good = [
            sum(verdicts[tool.name, name].kind not in {WRONG, NONE} for name in members)
            for tool in TOOLS
        ]
        table.append([family, len(members), *good])
    return rows(["family", "cases", *(tool.name for tool in TOOLS)], table)


def by_case(
    what: str, verdicts: Verdicts, tools: Sequence[Tool], cases: Sequence[Case]
) -> list[str]:
    """Return a table of all answers, inside a collapsed section."""
    table = []
    for case in cases:
        truth = case.forward if what == "forward" else case.backward
        table.append(
            [
                case.family,
                case.name,
                f"{truth:,}",
                *(verdicts[tool.name, case.name].text for tool in tools),
            ]
        )
    head = ["family", "case", "MACs", *(tool.name for tool in tools)]
    return [
        "",
        "<details>",
        f"<summary>{what.capitalize()}, case by case</summary>",
        "",
        *rows(head, table),
        "",
        "</details>",
    ]


def main() -> None:
    """Run all tools on all cases, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        default="",
        help="cases and families with this in their names; nothing is then written",
    )
    parser.add_argument(
        "--seconds", type=float, default=120, help="that one tool may take over one case"
    )
    options = parser.parse_args()
    cases = [
        case for case in CASES if options.only in f"{case.family} {case.name}" and case.name != TOLD
    ]
    load()
    found = {
        (tool.name, case.name): each
        for tool, case, each in ask([(t, c) for c in cases for t in TOOLS], options.seconds)
    }
    room = {case.name: int(found["lflops", case.name].get("pointwise", 0)) for case in cases}
    both = [case for case in cases if case.backward is not None]
    backwards = [tool for tool in TOOLS if tool.backward]
    forward = {
        (t.name, c.name): judge_forward(found[t.name, c.name], c, room[c.name])
        for t in TOOLS
        for c in cases
    }
    backward = {
        (t.name, c.name): judge_backward(found[t.name, c.name], c) for t in backwards for c in both
    }
    lines = [
        "Each tool counts the MACs of test cases. Its results are compared with results that were worked out by hand (`tests/conformance`).",
        f'The column "{POINTWISE}" has the results that are too high only because the tool counts pointwise operators as MACs.',
        f'"None" means that the tool had no result. Forward, {len(cases)} cases:',
    ]
    lines += ["", *summary(forward, TOOLS, KINDS), "", f"Backward, {len(both)} of these cases:"]
    lines += ["", *summary(backward, backwards, [kind for kind in KINDS if kind != POINTWISE])]
    lines += [
        "",
        f"Forward by kind of case: {RIGHT}, {WITHIN} or {POINTWISE}:",
        "",
        *by_family(forward, cases),
    ]
    lines += ["", *CONVENTIONS.strip().splitlines()]
    lines += by_case("forward", forward, TOOLS, cases) + by_case(
        "backward", backward, backwards, both
    )
    if options.only:
        print("\n".join(lines))
    else:
        record("accuracy.py", "Who counts right", lines)


if __name__ == "__main__":
    main()
