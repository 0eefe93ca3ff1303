"""Take the pictures of the documentation in Chromium.

The script in the README makes the first picture, `pictured_runs.py` makes those of a slow rank and
of a comparison, and the demo makes the others. Run `make pictures`.

python benchmarks/pictures.py [--page FILE] [--into FOLDER] [--width PIXELS]
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from playwright.sync_api import sync_playwright

from tests.support.browser import CHROMIUM
from tests.support.markdown_pages import blocks

ROOT = Path(__file__).parents[1]
VIEWS = {"run": 1000, "modules": 720, "timeline": 720, "roofline": 760, "memory": 760}
"""The views, and the height of each picture in pixels."""

WANTED = {
    "run": ".figures",
    "modules": ".grid-body [role=row]",
    "timeline": ".step-timeline svg",
    "roofline": ".picture svg",
    "ranks": ".ranks .facts",
    "compare": ".compared .sentences",
}
"""For each view, the element that must appear before the picture is taken."""


def take(browser: Any, page: Path, view: str, picture: Path, *, width: int, height: int) -> None:
    """Take pictures of a view in both themes, such as `run.png` and `run-dark.png`.

    Args:
        browser: Chromium.
        page: The file of a window or of a comparison.
        view: The view.
        picture: The file of the picture in the light theme.
        width: Width of the browser's window, in pixels.
        height: Height of the picture, from the top of the view.
    """
    for theme, ending in (("light", ""), ("dark", "-dark")):
        size = {"width": width, "height": height}
        opened = browser.new_page(viewport=size, color_scheme=theme)
        opened.goto(f"{page.resolve().as_uri()}#view={view}")
        opened.locator(WANTED.get(view, ".timeline svg")).first.wait_for()
        opened.screenshot(path=picture.with_stem(picture.stem + ending))
        opened.close()


FAULT_HEIGHT = 760
"""Height of the pictures of runs with faults, in pixels."""


def take_faults(browser: Any, into: Path, *, width: int) -> None:
    """Train the runs of `pictured_runs.py`; take pictures of the ranks and the comparison."""
    script = Path(__file__).parent / "pictured_runs.py"
    with TemporaryDirectory() as folder:
        for kind in ("slow-rank", "before", "after"):
            run = [sys.executable, "-W", "ignore", str(script), kind, f"{folder}/{kind}"]
            subprocess.run(run, check=True)  # noqa: S603
        page = max(Path(folder, "slow-rank").rglob("train-*.profile.html"))
        take(browser, page, "ranks", into / "ranks.png", width=width, height=FAULT_HEIGHT)
        compared = Path(folder, "compared.html")
        runs = [str(Path(folder, "before")), str(Path(folder, "after"))]
        command = [sys.executable, "-m", "lflops", "html", *runs, "-o", str(compared)]
        subprocess.run(command, check=True)  # noqa: S603
        take(browser, compared, "compare", into / "compare.png", width=width, height=FAULT_HEIGHT)


HERO_SIZE = {"width": 1280, "height": 770}


def take_hero(browser: Any, into: Path) -> None:
    """Run the script in the README, and take the first screen of its page in both themes."""
    readme = (ROOT / "README.md").read_text("utf-8")
    script = next(block.code for block in blocks(readme) if block.language == "python")
    with TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-W", "ignore", "-c", script], cwd=folder, check=True)  # noqa: S603
        page = max(Path(folder).rglob("train-*.profile.html"))
        take(browser, page, "run", into / "hero.png", **HERO_SIZE)


def main() -> None:
    """Take the first picture from the README's script, and the others from the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="the page of a window; else the demo's last one")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--width", type=int, default=1280)
    asked = parser.parse_args()
    page = asked.page or max((ROOT / "gpt" / "lflops").glob("train-*.html"), default=None)
    if page is None or CHROMIUM is None:
        sys.exit(
            "There is no page: run `make demo` first."
            if page is None
            else "There is no Chromium: apt-get install chromium"
        )
    asked.into.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        take_hero(browser, asked.into)
        take_faults(browser, asked.into, width=asked.width)
        for view, height in VIEWS.items():
            picture = asked.into / f"{view}.png"
            take(browser, page, view, picture, width=asked.width, height=height)
        browser.close()
    print(f"{(len(VIEWS) + 3) * 2} pictures in {asked.into}")


if __name__ == "__main__":
    main()
