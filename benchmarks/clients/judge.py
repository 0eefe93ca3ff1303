"""Compare the reports of lflops about a client with the stopwatches and with known facts."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.clients.cells import PLAIN, REPEATED, WATCHED, cells_of, read
from benchmarks.clients.client import Client

TOLERANCE = 0.2
"""Largest relative difference of a finding's cost and the stopwatch."""

SHARE_TOLERANCE = 0.15
"""Largest difference of a phase's share and the stopwatch, in a run without a fault."""

LEAST_SHARE = 0.05

NAMED = {
    "slow data": frozenset({"data"}),
    "slow module": frozenset({"slow", "sleep", "python"}),
    "slow hook": frozenset({"slow", "sleep", "python"}),
    "step logging": frozenset({"other", "logging"}),
    "slow validation": frozenset({"validation", "inference"}),
    "slow reward": frozenset({"reward", "generation", "inference", "rollout", "other"}),
    "slow rollout": frozenset({"generation", "inference", "rollout", "other"}),
}
"""The causes that name a planted fault."""

HOOKED = {"slow module", "slow hook"}
"""Faults that are planted with a hook. An issue about a module's own code that names hooks is right."""

IMPOSSIBLE = {"transfer", "copy", "idle", "communication", "rank", "turns", "sync", "wait"}
"""Causes that a run of one process on a CPU cannot have."""


@dataclass(frozen=True, kw_only=True)
class FaultRow:
    """A planted fault, and the report of `lflops why`.

    Attributes:
        fault: The planted fault.
        planted: Its cost by the stopwatch, in seconds per step.
        share: Its share of the step, by the stopwatch.
        first: The cause of the first finding, with its module. Findings that are also true without
            the fault, and that cost more than the fault, are skipped.
        said: The sentence of the first finding.
        is_first: Whether the first finding names the fault.
        ratio: The cost of the finding that names the fault, divided by the cost by the stopwatch.
            The cost at the same place in the run without the fault is subtracted first.
    """

    fault: str
    planted: float | None
    share: float | None
    first: str
    said: str
    is_first: bool
    ratio: float | None

    @property
    def is_exact(self) -> bool:
        """Return whether the cost is within the tolerance."""
        return self.ratio is not None and abs(self.ratio - 1) <= TOLERANCE


@dataclass(frozen=True, kw_only=True)
class Row:
    """A client and its results. `None` means unknown.

    Attributes:
        name: The name of the client's file.
        package: The package that trains, with its version.
        held_out: Whether it was added after the rules were fixed.
        is_deterministic: Whether two plain runs are equal to the bit.
        is_equal: Whether all watched runs are equal to the plain run to the bit. The planted faults
            do not change the training.
        died: Cells that ended with an error, with the last line of their output.
        samples: "right", "unknown", or "wrong" with the number.
        tokens: "right", "unknown", or "wrong" with the number.
        status: The status of the explanation of the run without a fault.
        findings: Issues of the run without a fault.
        false: The issues that are known to be false, with the reason.
        faults: The planted faults.
    """

    name: str
    package: str
    held_out: bool
    is_deterministic: bool | None
    is_equal: bool | None
    died: dict[str, str]
    samples: str
    tokens: str
    status: str
    findings: list[str]
    false: list[str]
    faults: list[FaultRow]


def judge(results: Path, name: str, client: Client, version: str) -> Row:
    """Judge the finished cells of a client."""
    plain = read(results, name, PLAIN)
    repeated = read(results, name, REPEATED)
    watched = read(results, name, WATCHED)
    why = watched.get("why", {})
    units = watched.get("units") or {}
    issues = [finding for finding in why.get("findings", []) if finding["is_issue"]]
    plain_step = plain.get("truth", {}).get("mean step")
    false = list(_false(issues, client, repeated))
    false_causes = frozenset(reason.partition(":")[0] for reason in false)
    faults = []
    faulty = []
    for cell in cells_of(client):
        result = read(results, name, cell)
        if cell.fault is not None and result.get("status") == 0:
            row = _fault_row(
                result,
                fault=cell.fault,
                accepted=client.accepts.get(cell.fault, frozenset()),
                clean=why,
                false=false_causes,
                plain_step=plain_step,
            )
            faults.append(row)
            faulty.append(result)
    return Row(
        name=name,
        package=f"{client.package} {version}".strip(),
        held_out=client.held_out,
        is_deterministic=_is_equal(plain, repeated),
        is_equal=_are_equal(plain, [watched, *faulty]),
        died=dict(_died(results, name, client)),
        samples=_units(units.get("samples"), client.samples),
        tokens=_units(units.get("tokens"), client.tokens),
        status=why.get("status", "–"),
        findings=[f"{finding['cause']}: {finding['sentence']}" for finding in issues],
        false=false,
        faults=faults,
    )


def _is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool | None:
    digests = [cell.get("truth", {}).get("digest") for cell in (one, other)]
    if not all(digests):
        return None
    return bool(digests[0] == digests[1])


def _are_equal(plain: dict[str, Any], watched: list[dict[str, Any]]) -> bool | None:
    """Return whether all finished watched runs are equal to the plain run.

    Returns `None` if no watched run has finished.
    """
    answers = [_is_equal(plain, each) for each in watched]
    known = [answer for answer in answers if answer is not None]
    return all(known) if known else None


def _died(results: Path, name: str, client: Client) -> Iterator[tuple[str, str]]:
    for cell in cells_of(client):
        result = read(results, name, cell)
        if result and result["status"] != 0:
            output = results / name / cell.name.replace(", ", "-").replace(" ", "-") / "output.txt"
            lines = output.read_text(errors="replace").strip().splitlines()
            yield cell.name, f"{result['status']}: {lines[-1][:200] if lines else ''}"
        elif result.get("why", {}).get("status") == "failed":
            yield f"why of {cell.name}", result["why"]["error"]


def _units(said: float | None, true: tuple[int, int] | None) -> str:
    """Return whether a number of samples or tokens per step is right, as text."""
    if said is None:
        return "unknown"
    if true is None:
        return f"wrong: {said:g}, there are none"
    least, most = true
    if least <= said <= most:
        return "right"
    return f"wrong: {said:g}, not {least}" + (f" to {most}" if most > least else "")


def _false(issues: list[dict[str, Any]], client: Client, timed: dict[str, Any]) -> Iterator[str]:
    """Yield issues of a run without a fault that contradict the stopwatch or known facts."""
    phases = timed.get("truth", {}).get("phases") or {}
    for issue in issues:
        cause = issue["cause"]
        if cause in IMPOSSIBLE:
            yield f"{cause}: one process on a CPU"
        elif cause == "validation" and not client.validates:
            yield "validation: there is none"
        elif cause == "padding":
            yield from _false_padding(issue, client)
        elif cause == "outside" and ".item()" in issue["fix"] and client.watch != "lightning":
            yield "outside: this loop and its forward have no .item(), images, prints or loops"
        elif cause in phases and issue["share"] > phases[cause] + SHARE_TOLERANCE:
            yield f"{cause}: {issue['share']:.0%}, by the stopwatch {phases[cause]:.0%}"


def _false_padding(issue: dict[str, Any], client: Client) -> Iterator[str]:
    """Yield the reported share of padding if it is wrong."""
    least, most = client.padding
    claimed = re.search(r"([0-9.]+) % of each batch is padding", issue["sentence"])
    if most == 0:
        yield "padding: there is none"
    elif claimed is not None and not least <= float(claimed[1]) / 100 <= most:
        yield f"padding: {claimed[1]} %, not {least:.0%} to {most:.0%}"


def _fault_row(
    result: dict[str, Any],
    *,
    fault: str,
    accepted: frozenset[str],
    clean: dict[str, Any],
    false: frozenset[str],
    plain_step: float | None,
) -> FaultRow:
    """Judge a cell with a fault.

    Args:
        result: The cell.
        fault: What was planted.
        accepted: Further causes that name it in this client, wherever its code is.
        clean: The explanation of the run without a fault.
        false: Causes of issues in that run that are known to be false.
        plain_step: The mean step of the plain run in seconds.
    """
    truth = result["truth"]
    module = truth["module"] if fault in {"slow module", "slow hook"} else None
    planted = truth["planted"]
    # The findings are in the order in which `lflops why` prints them. Large overhead that is not an
    # issue, such as inference without gradients, may come before issues.
    printed = [each for each in result["why"]["findings"] if each["cause"] != "busiest"]
    names_it = []
    for finding in printed:
        causes = NAMED[fault]
        if fault in HOOKED and finding["is_issue"] and "forward hooks" in finding["sentence"]:
            causes |= {"no_products"}
        is_named = _names(finding, causes, module)
        if fault == "slow hook" and module is not None:
            # torch calls a forward hook of a module in the time of the module around it.
            is_named |= _names(finding, NAMED[fault], module.rpartition(".")[0])
        if is_named or finding["cause"] in accepted:
            names_it.append(finding)
    ratio = None
    if names_it and planted and names_it[0]["seconds"] is not None:
        without = _cost_without(names_it[0], clean)
        cost = names_it[0]["seconds"] - without
        ratio = _ratio(cost, planted, truth.get("planted to the end") or planted)
    first = printed[0] if printed else None
    for finding in printed:
        if finding["cause"] in false or not _is_natural(finding, clean, planted):
            first = finding
            break
    return FaultRow(
        fault=fault,
        planted=planted,
        share=planted / (planted + plain_step) if planted and plain_step else None,
        first=f"{first['cause']} {first['module']}".strip() if first else result["why"]["status"],
        said=first["sentence"] if first else result["why"].get("because", ""),
        is_first=first in names_it,
        ratio=ratio,
    )


def _names(finding: dict[str, Any], causes: frozenset[str], module: str | None) -> bool:
    is_there = module is None or _covers(finding["module"], module)
    return finding["cause"] in causes and is_there


def _covers(pattern: str, module: str) -> bool:
    """Return whether a pattern such as `layers.{0-2,5}.*` matches the name of a module."""
    parts = pattern.split(".")
    names = module.split(".")
    if len(parts) != len(names):
        return False
    return all(_covers_part(*pair) for pair in zip(parts, names, strict=True))


def _covers_part(part: str, name: str) -> bool:
    if not part.startswith("{"):
        return part in {"*", name}
    for numbers in part.strip("{}").split(","):
        first, _, last = numbers.partition("-")
        if name.isdigit() and int(first) <= int(name) <= int(last or first):
            return True
    return False


def _ratio(cost: float, least: float, most: float) -> float:
    """Return the ratio of a cost to the stopwatch.

    The stopwatch has two values, without and with the time after the last step. Any cost between
    them is exact.
    """
    if least <= cost <= most:
        return 1.0
    return cost / least if cost < least else cost / most


def _is_natural(issue: dict[str, Any], clean: dict[str, Any], planted: float | None) -> bool:
    """Return whether a finding also exists without the fault, and costs more than the fault.

    A finding that costs so much more than without the fault that it contains the fault is not
    natural.
    """
    same = _same_finding(issue, clean)
    if same is None or not planted:
        return False
    cost = issue["seconds"] or 0.0
    without = same["seconds"] or 0.0
    return cost > planted and without > planted / 2 and cost - without < planted / 2


def _same_finding(finding: dict[str, Any], clean: dict[str, Any]) -> dict[str, Any] | None:
    """Return the finding with the same cause and place in the run without the fault."""
    for other in clean.get("findings", []):
        if all(other[key] == finding[key] for key in ("cause", "module", "of")):
            return dict(other)
    return None


def _cost_without(finding: dict[str, Any], clean: dict[str, Any]) -> float:
    """Return the cost of the same finding in the run without the fault."""
    same = _same_finding(finding, clean)
    return (same["seconds"] or 0.0) if same else 0.0


def table(rows: list[Row]) -> Iterator[str]:
    """Yield the rows as a Markdown table, followed by the totals."""
    yield "| training code | equal bit for bit | samples | tokens | findings without a fault | false findings | planted faults: whether the first finding is right, and its cost / the time by a stopwatch |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        equal = {True: "yes", False: "no", None: "–"}[row.is_equal]
        if row.is_deterministic is False:
            equal = "not deterministic"
        if row.died:
            equal += " (" + ", ".join(f"{cell} died" for cell in row.died) + ")"
        causes = ", ".join(finding.partition(":")[0] for finding in row.findings) or row.status
        faults = "; ".join(_fault_cell(fault) for fault in row.faults)
        name = f"{row.name}, held out" if row.held_out else row.name
        yield f"| {name} ({row.package}) | {equal} | {row.samples} | {row.tokens} | {causes} | {'; '.join(row.false) or '–'} | {faults} |"
    yield ""
    yield from totals(rows)


def _fault_cell(row: FaultRow) -> str:
    if row.planted is None:
        return f"{row.fault}: its hook was never called"
    mark = "✓" if row.is_first else f"✗ {row.first}"
    ratio = f" {row.ratio:.2f}" if row.ratio is not None else ""
    return f"{row.fault} {mark}{ratio}"


def totals(rows: list[Row]) -> Iterator[str]:
    """Yield how many clients and faults are right."""
    compared = [row for row in rows if row.is_deterministic and row.is_equal is not None]
    equal = sum(bool(row.is_equal) for row in compared)
    yield f"- With and without lflops, {equal} of {len(compared)} deterministic training runs are equal, bit for bit."
    yield f"- A process died in {sum(bool(row.died) for row in rows)} of {len(rows)} training runs."
    for unit in ("samples", "tokens"):
        answers = [getattr(row, unit) for row in rows]
        wrong = sum(answer.startswith("wrong") for answer in answers)
        yield f"- {unit.title()} in a step: {answers.count('right')} right, {answers.count('unknown')} unknown, {wrong} wrong."
    false = sum(len(row.false) for row in rows)
    of = sum(len(row.findings) for row in rows)
    yield f"- Runs without a fault have {of} issues, of which {false} are known to be false."
    for held_out in (False, True):
        planted = [fault for row in rows if row.held_out is held_out for fault in row.faults]
        asked = [fault for fault in planted if (fault.share or 0) >= LEAST_SHARE]
        first = [fault for fault in asked if fault.is_first]
        exact = sum(fault.is_exact for fault in first)
        place = " in training code that was held out" if held_out else ""
        yield f"- Planted faults{place}: {len(first)} of {len(asked)} are the first finding. For {exact} of these, the cost is within {TOLERANCE:.0%} of the stopwatch."


def wrong_answers(rows: list[Row]) -> Iterator[str]:
    """Yield each wrong answer as a line of Markdown, with the sentence and the truth."""
    for row in rows:
        for cell, error in row.died.items():
            yield f"- **{row.name}, {cell}**: died, {error}"
        if row.is_deterministic and row.is_equal is False:
            yield f"- **{row.name}**: the watched run differs from the plain one"
        for unit in ("samples", "tokens"):
            answer = getattr(row, unit)
            if answer.startswith("wrong"):
                yield f"- **{row.name}**, {unit}: {answer.removeprefix('wrong: ')}"
        for reason in row.false:
            said = next(each for each in row.findings if each.startswith(reason.split(":")[0]))
            yield f'- **{row.name}**, no fault: "{said.partition(": ")[2]}" But {reason}.'
        for fault in row.faults:
            yield from _wrong_fault(row.name, fault)


def _wrong_fault(name: str, row: FaultRow) -> Iterator[str]:
    if row.planted is None or row.share is None:
        yield f"- **{name}, {row.fault}**: nothing was planted"
        return
    truth = f"{1e3 * row.planted:.1f} ms of each step are planted, {row.share:.0%}"
    if not row.is_first:
        yield f'- **{name}, {row.fault}**: "{row.said}" ({row.first}). Truth: {truth}'
    elif not row.is_exact:
        ratio = "unknown" if row.ratio is None else f"{row.ratio:.2f}"
        yield f'- **{name}, {row.fault}**: named, cost / planted {ratio}. "{row.said}" Truth: {truth}'


def as_json(rows: list[Row]) -> str:
    """Return the rows as JSON."""
    return json.dumps([asdict(row) for row in rows], indent=2)
