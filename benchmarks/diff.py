"""Check that `diff` finds a module that became 10 % slower, and nothing for equal code.

The machine is idle or busy. Runs of 30 steps alternate in one process, unchanged and with one
module that waits for a tenth of its own time. Then pairs of equal runs are checked against a limit.
Half of the pairs run on an idle machine. In the other half, one run or both run while two other
processes compute.
"""

import contextlib
import io
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from results import beside, keep_freed_memory, record
from torch import Tensor, nn

import lflops
from lflops.analysis.compare.diff import Diff
from lflops.cli.main import main as command_line
from lflops.profile.profile import Profile

WIDTH, ROWS, STEPS, TIMES, SLOWER = 768, 256, 30, 10, 0.10
SHAPES = ((1, 1), (1, 1), (1, 2), (2, 1), (1, 1), (1, 1))
SLOW = "2"


class Waiting(nn.Linear):
    """A linear layer that waits after its forward."""

    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer, then keep the processor busy."""
        out = super().forward(x)
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass
        return out


def self_seconds(profile: Profile) -> dict[str, float]:
    """Return the self time of forward and backward of each module."""
    works = {
        name: (module.forward.self_seconds, module.backward.self_seconds)
        for name, module in profile.modules.items()
    }
    return {name: sum(spread.median for spread in both if spread) for name, both in works.items()}


def told(found: Diff) -> str:
    """Return the modules that `diff` reports as slower or faster, as a table cell."""
    news = [
        f"`{module.name}` {module.news.beyond - 1:+.1%}"
        for module in (*found.slower, *found.faster)
        if module.news.beyond is not None
    ]
    return ", ".join(news) or "nothing"


PAIRS = 20
BESIDE = [*[(0, 0)] * 3, (0, 2), (2, 0), (2, 2)]
"""Numbers of other processes during the two runs of a pair."""


def pairs(ran: Callable[[], Profile]) -> list[str]:
    """Compare equal runs with `lflops diff --max-regress 5%`.

    Returns a table with a row for each kind of pair, and the verdicts of the command.
    """
    found: defaultdict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(PAIRS):
            both = BESIDE[number % len(BESIDE)]
            paths = [str(Path(folder, f"{side}.json")) for side in range(2)]
            for others, path in zip(both, paths, strict=True):
                with beside(others, first=False):
                    ran().save(path)
            with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())) as said:
                status = command_line(["diff", *paths, "--max-regress", "5%", "--json"])
            found[both].append((status, json.loads(said.buffer.getvalue())["status"]))
    lines = [
        "| processes beside the first run | the second | pairs | exit status 1 | the step |",
        "|--:|--:|--:|--:|---|",
    ]
    for both, results in found.items():
        verdicts = Counter(verdict for _, verdict in results)
        said_of_it = ", ".join(f"{verdict} {times}" for verdict, times in verdicts.items())
        lines.append(
            f"| {both[0]} | {both[1]} | {len(results)} | {sum(status == 1 for status, _ in results)} | {said_of_it} |"
        )
    return lines


def main() -> None:
    """Run, compare, and write the table."""
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    model = nn.Sequential(
        *(Waiting(WIDTH * a, WIDTH * b) for a, b in SHAPES), nn.LayerNorm(WIDTH), nn.GELU()
    )
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    slow = model.get_submodule(SLOW)

    def ran(share: float = 0.0) -> Profile:
        slow.seconds = share * usual[SLOW]  # type: ignore[assignment]
        return lflops.measure(model, x, backward=True, repeats=STEPS, hardware=None)

    usual = {SLOW: 0.0}
    usual = self_seconds(ran())
    same, planted = [ran()], []
    for _ in range(TIMES):
        planted.append(ran(SLOWER))
        same.append(ran())
    lines = [
        "| | 10 % planted in `2`: told | the whole run | the same code: told | the whole run |",
        "|--:|---|--:|---|--:|",
    ]
    found = nothing = 0
    for i, (before, slowed, after) in enumerate(zip(same, planted, same[1:], strict=False), 1):
        one, other = lflops.diff(before, slowed), lflops.diff(before, after)
        found += [module.name for module in (*one.slower, *one.faster)] == [SLOW]
        nothing += not (other.slower or other.faster)
        wholes = [f"{each.whole.ratio - 1:+.1%}" if each.whole else "–" for each in (one, other)]
        lines.append(f"| {i} | {told(one)} | {wholes[0]} | {told(other)} | {wholes[1]} |")
    share, milliseconds = usual[SLOW] / sum(usual.values()), usual[SLOW] * 1e3
    summary = f"Found, and nothing else: {found} of {TIMES}. Nothing between runs of the same code: {nothing} of {TIMES}. The module takes"
    runs = f"{STEPS} clean and {STEPS} hooked steps a run, all in turn in one process; one thread"
    lines += [
        "",
        f"{summary} {milliseconds:.1f} ms, {share:.0%} of the step; {runs}.",
        "",
        "`lflops diff` of equal runs:",
        "",
        *pairs(ran),
    ]
    record("diff.py", "Two runs compared", lines)


if __name__ == "__main__":
    main()
