"""Check that the page is fast with 20,000 modules.

The script opens the tab in Chromium, sorts and filters rows, and compares windows. It also measures
the file and the server. All times differ in every digit, so that the data does not compress better
than in a real run.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from msgspec import json
from msgspec.structs import replace
from playwright.sync_api import sync_playwright
from results import record
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import lflops
from lflops.analysis.analysis import analyze
from lflops.monitoring.inputs.settings import Settings
from lflops.monitoring.inputs.training import Training
from lflops.monitoring.window_publisher import WindowPublisher
from lflops.profile.profile import ModuleProfile, Profile, Work
from lflops.profile.records import PHASES, TimingStats
from lflops.report.html import page
from lflops.report.payload.payload import payload
from tests.support.browser import CHROMIUM
from tests.support.profile_builders import profile_of
from tests.support.tensorboard_server import Board, board

MODULES, REPEATS = 20_000, 5

SEEN = """
new MutationObserver((_, observer) => {
  if (!document.querySelector(WANTED)) return;
  observer.disconnect();
  requestAnimationFrame(() => { const here = new MessageChannel(); here.port1.onmessage = () => { window.drawn = performance.now(); };
    here.port2.postMessage(null); });
}).observe(document, { childList: true, subtree: true });
"""
"""A script that stores when an element first appears, in milliseconds of the frame."""

TAKES = """(node, act) => new Promise((resolve) => {
  const start = performance.now();
  if (act === "click") node.click();
  else { node.value = act; node.dispatchEvent(new Event("input")); }
  requestAnimationFrame(() => {
    const here = new MessageChannel();
    here.port1.onmessage = () => resolve((performance.now() - start) / 1e3);
    here.port2.postMessage(null);
  });
})"""
"""A function that returns the seconds from an event until the next frame is drawn."""

PRESSES = TAKES.replace(
    'if (act === "click") node.click();\n  else { node.value = act; node.dispatchEvent(new Event("input")); }',
    'document.querySelector(".icicle").dispatchEvent(new KeyboardEvent("keydown", { key: act, bubbles: true }));',
)
"""A function like `TAKES`, for a key in the icicle."""

RUNS, WINDOWS = 30, 50


def jittered(profile: Profile, seed: int) -> Profile:
    """Return the profile with times that all differ."""
    chance = random.Random(seed)  # noqa: S311 - times, no secret

    def spread(given: TimingStats | None) -> TimingStats | None:
        if given is None:
            return None
        median = given.median * chance.uniform(0.9, 1.1)
        return TimingStats(
            median=median,
            low=median * chance.uniform(0.9, 1),
            high=median * chance.uniform(1, 1.1),
            n=10,
        )

    def work(given: Work) -> Work:
        return replace(
            given,
            seconds=spread(given.seconds),
            self_seconds=spread(given.self_seconds),
            device_seconds=spread(given.device_seconds),
        )

    def module(given: ModuleProfile) -> ModuleProfile:
        return replace(given, **{phase: work(given.work(phase)) for phase in PHASES})

    return replace(
        profile, modules={name: module(given) for name, given in profile.modules.items()}
    )


def answered(server: Board) -> tuple[float, float, int]:
    """Return the median seconds of the two requests, and the size of a window in bytes.

    The requests are for the list of windows and for a window.
    """
    place = server.windows(expected=2)["windows"][0]
    asked = {name: place[name] for name in ("run", "tag", "step")}
    answer = server.get("window", accept="deflate", **asked)
    return (
        taken(lambda: server.get("windows")),
        taken(lambda: server.get("window", accept="deflate", **asked)),
        len(answer[2]),
    )


def taken(act: Callable[[], object]) -> float:
    """Return the median seconds of a function."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def drawn(browser: Any, server: Board, view: str, wanted: str) -> float:
    """Return the median seconds from the tab's frame until a view shows the wanted element."""
    seconds = []
    for _ in range(REPEATS):
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        context.add_init_script(SEEN.replace("WANTED", f'"{wanted}"'))
        opened = context.new_page()
        opened.goto(f"{server.address}#lflops&p.lflops.state=view%3D{view}")
        frame = opened.frame_locator("iframe").locator("body")
        frame.locator(wanted).first.wait_for()
        seconds.append(
            frame.evaluate(
                "() => new Promise((done) => { const ask = () => (window.drawn ? done(window.drawn / 1e3) : "
                "requestAnimationFrame(ask)); ask(); })"
            )
        )
        context.close()
    return statistics.median(seconds)


def acted(browser: Any, file: Path) -> dict[str, float]:
    """Return the median seconds of typical actions in the table of modules."""
    opened = browser.new_page(viewport={"width": 1280, "height": 800})
    opened.goto(file.as_uri())
    opened.get_by_role("tab", name="Modules").click()
    sort, field = (
        opened.get_by_role("button", name="forward time"),
        opened.get_by_label("filter by name or class"),
    )

    def times(node: Any, *acts: str) -> float:
        return statistics.median(
            [node.evaluate(TAKES, act) for _ in range(REPEATS) for act in acts]
        )

    found = {"sort, repeats folded": times(sort, "click")}
    opened.locator(".icicle").focus()
    zooms = [
        opened.locator(".icicle").evaluate(PRESSES, key)
        for _ in range(REPEATS)
        for key in ("ArrowDown", " ", "-")
    ]
    found["icicle: next bar, zoom, back"] = statistics.median(zooms)
    found["search, repeats folded"] = times(field, "7", "7.lay", "")
    opened.get_by_label("fold identical modules").uncheck()
    opened.get_by_role("button", name="open all").click()
    found["sort, all rows open"] = times(sort, "click")
    opened.get_by_label("flat").check()
    found["sort, flat"] = times(sort, "click")
    found["filter, flat"] = times(field, "7", "7.lay", "")
    opened.get_by_label("flat").uncheck()
    found["filter, in the tree"] = times(field, "7", "7.lay", "")
    opened.close()
    return found


def payload_made(profile: Profile) -> float:
    """Return the median CPU seconds from a profile to the bytes of its payload."""
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        json.encode(payload(analyze(profile)))
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def taken_of_training(profile: Profile, folder: Path) -> float:
    """Return the median CPU seconds of the training thread for saving a window.

    This includes its page and its data for TensorBoard.
    """
    settings = Settings(dirpath=folder)
    seconds = []
    for number in range(REPEATS):
        training = Training(
            loop=nn.Identity(),
            model=nn.Identity(),
            root=nn.Identity(),
            device=torch.device("cpu"),
            loggers=[TensorBoardLogger(folder, version=number)],
            logged_step=lambda: 1,
            log=str,
        )
        results = WindowPublisher(training, settings, str(folder), monitor=1, store=None)
        window = replace(profile, run=replace(profile.run, stage="train", window=number))
        results.save(window, results.paths.profile(window.run))
        start = time.thread_time()
        results.add(window, ())
        while results.pending:
            # A training step may take this long. Sleep uses no CPU time.
            time.sleep(0.1)
            results.report_ready()
        seconds.append(time.thread_time() - start)
        results.finish(failed=False)
        training.loggers[0].experiment.close()
    return statistics.median(seconds)


def many_runs(browser: Any, logs: Path) -> dict[str, tuple[float, float | None]]:
    """Return the seconds for many runs with many windows each, each with its limit.

    Measured are the list of windows and the tab.
    """
    small = profile_of(20)
    for run in range(RUNS):
        with SummaryWriter(logs / f"run{run}") as writer:
            for step in range(WINDOWS):
                lflops.tensorboard.log(writer, small, step, figures=False)
    with board(logs) as server:
        server.windows(expected=RUNS * WINDOWS)
        listed = taken(lambda: server.get("windows"))
        return {
            f"{RUNS} runs of {WINDOWS} windows: the list": (listed, 0.5),
            f"{RUNS} runs of {WINDOWS} windows: the tab drawn, at Summary": (
                drawn(browser, server, "summary", ".figure"),
                0.5,
            ),
            f"{RUNS} runs of {WINDOWS} windows: the tab shows the Runs view": (
                drawn(browser, server, "runs", "[role=grid] .grid-body [role=row]"),
                0.5,
            ),
        }


def main() -> None:
    """Measure, and write the table."""
    profiles = [jittered(profile_of(MODULES), seed) for seed in (1, 2)]
    row = "[role=treegrid] .grid-body [role=row]"
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        file = Path(folder) / "page.html"
        file.write_text(page(analyze(profiles[1])), encoding="utf-8")
        both = len(page(*map(analyze, profiles), names=("before", "after")).encode())
        with SummaryWriter(f"{folder}/run") as writer:
            for step, profile in enumerate(profiles):
                lflops.tensorboard.log(writer, profile, step)
        with board(Path(folder)) as server:
            listed, answer, size = answered(server)
            seconds = {
                "the server sends the list of windows": (listed, 0.1),
                "the server sends a window": (answer, 0.1),
                "the tab shows the Summary view": (
                    drawn(browser, server, "summary", ".figures"),
                    0.5,
                ),
                "the tab shows the Modules view": (drawn(browser, server, "modules", row), 0.5),
                "the tab shows the Compare view": (
                    drawn(browser, server, "compare", ".changes"),
                    None,
                ),
            }
        seconds |= {act: (each, 0.05) for act, each in acted(browser, file).items()}
        seconds |= many_runs(browser, Path(folder) / "many")
        seconds["CPU time to create the data of the page"] = (payload_made(profiles[0]), 1.0)
        seconds["CPU time of the training thread to write the page and the data of a window"] = (
            taken_of_training(profiles[0], Path(folder)),
            0.05,
        )
        browser.close()
        sizes = {
            "the HTML file of one window": file.stat().st_size,
            "the HTML file that compares two windows": both,
            "the data of a window, as it is stored and sent": size,
        }
    lines = ["| | seconds | limit |", "|---|--:|--:|"]
    lines += [
        f"| {what} | {each:.3f} | {'' if most is None else most} |"
        for what, (each, most) in seconds.items()
    ]
    lines += [
        "",
        "| | MB |",
        "|---|--:|",
        *(f"| {what} | {each / 1e6:.2f} |" for what, each in sizes.items()),
    ]
    chosen = f"The profile has {MODULES:,} modules, with a time for each entry of work. All values are medians of {REPEATS} measurements. The limit for the HTML file of one window is 5 MB."
    record("page.py", "The page with 20,000 modules", [*lines, "", chosen])


if __name__ == "__main__":
    main()
