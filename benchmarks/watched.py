"""`lflops run` over scripts that were not written for it.

What it finds in each, and whether it ends as without.

python benchmarks/watched.py --examples DIR --lightning DIR [--only NAME ...]

The folders are checkouts of pytorch/examples and of Lightning. lflops has to be installed. The
scripts run as they are; a package beside them stands in for torchvision, with random images, and a
text of random words for WikiText.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from results import record

from lflops.errors import ProfileError
from lflops.ledger.account import CATEGORIES, CAUSES
from lflops.ledger.run import load_run

SHIM = Path(__file__).parent / "examples_shim"
PATIENCE = 400  # seconds that a script may take


class Example(NamedTuple):
    """A script of a checkout, and its arguments."""

    name: str
    path: str  # below the checkout
    arguments: tuple[str, ...] = ()
    has_images: bool = False  # whether torchvision is stood in for


SMALL = ("--emsize", "64", "--nhid", "64")
GAN = ("--dataset", "fake", "--niter", "1", "--ngf", "16", "--ndf", "16", "--batchSize", "16")

EXAMPLES = [
    Example("regression", "regression/main.py"),
    Example("language model, LSTM", "word_language_model/main.py", ("--epochs", "2", *SMALL)),
    Example(
        "the same with an optimizer",
        "word_language_model/main.py",
        ("--epochs", "2", *SMALL, "--use-optimizer"),
    ),
    Example(
        "the same, a transformer",
        "word_language_model/main.py",
        ("--epochs", "2", *SMALL, "--use-optimizer", "--model", "Transformer"),
    ),
    Example(
        "MNIST", "mnist/main.py", ("--epochs", "2", "--no-accel", "--save-model"), has_images=True
    ),
    Example("MNIST, LSTM", "mnist_rnn/main.py", ("--epochs", "2"), has_images=True),
    Example(
        "MNIST, hogwild",
        "mnist_hogwild/main.py",
        ("--epochs", "1", "--num-processes", "2"),
        has_images=True,
    ),
    Example(
        "variational autoencoder", "vae/main.py", ("--epochs", "2", "--no-accel"), has_images=True
    ),
    Example("GAN", "dcgan/main.py", GAN, has_images=True),
    Example("actor and critic", "reinforcement_learning/actor_critic.py"),
]
LIGHTNINGS = [
    Example("Lightning, bug report", "examples/pytorch/bug_report/bug_report_model.py"),
    Example(
        "image classifier",
        "examples/fabric/image_classifier/train_torch.py",
        ("--epochs", "2"),
        has_images=True,
    ),
]


def _prepare(folder: Path) -> None:
    """Put the data where the scripts look for it."""
    words = [f"w{number}" for number in range(500)]
    data = folder / "data" / "wikitext-2"
    if (folder / "data.py").exists():
        data.mkdir(parents=True, exist_ok=True)
        for name, lines in (("train", 1_500), ("valid", 150), ("test", 150)):
            text = "\n".join(" ".join(random.choices(words, k=20)) for _ in range(lines))  # noqa: S311 - no secret
            (data / f"{name}.txt").write_text(text)


def _run(example: Example, checkout: Path) -> str:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "script")
        shutil.copytree((checkout / example.path).parent, folder)
        _prepare(folder)
        (folder / "results").mkdir(exist_ok=True)
        path = os.pathsep.join(
            filter(
                None, [str(SHIM) if example.has_images else "", os.environ.get("PYTHONPATH", "")]
            )
        )
        script = [Path(example.path).name, *example.arguments]
        took, statuses = [], []
        for before in ([], ["-m", "lflops", "run", "--dir", f"{temporary}/run"]):
            began = time.monotonic()
            command = [sys.executable, *before, *script]
            with Path(temporary, "output").open("w") as output:
                ended = subprocess.run(  # noqa: S603 - what is measured
                    command,
                    cwd=folder,
                    env=os.environ | {"PYTHONPATH": path},
                    stdout=output,
                    stderr=output,
                    timeout=PATIENCE,
                    check=False,
                )
            took.append(time.monotonic() - began)
            statuses.append(ended.returncode)
        found = Path(temporary, "output").read_text()
        try:
            ledger = load_run(f"{temporary}/run")
        except ProfileError:
            print(found[-500:])
            return f"| {example.name} | | {'as without' if statuses[0] == statuses[1] else statuses} | not found | | |"
    groups = [
        f"{CATEGORIES[name]} {seconds:.1f} s" for name, seconds in [*ledger.by_group().items()][:4]
    ]
    phases = {
        name.partition("/")[2]: value
        for name, value in ledger.seconds.items()
        if name.startswith("training/")
    }
    trained = sum(phases.values())
    shares = [
        f"{name} {value / trained:.0%}"
        for name, value in sorted(phases.items(), key=lambda item: -item[1])[:4]
    ]
    slow: dict[str, int] = {}
    for each in ledger.slow_steps:
        slow[each.cause] = slow.get(each.cause, 0) + 1
    causes = ", ".join(f"{number} × {CAUSES[cause]}" for cause, number in slow.items()) or "none"
    status = (
        "as without" if statuses[0] == statuses[1] else f"{statuses[1]} in place of {statuses[0]}"
    )
    return f"| {example.name} | {ledger.steps} | {status} | {', '.join(groups)} | {', '.join(shares)} | {causes} |"


def _rows(asked: argparse.Namespace) -> Iterator[str]:
    for checkout, examples in ((asked.examples, EXAMPLES), (asked.lightning, LIGHTNINGS)):
        for each in examples if checkout is not None else ():
            if not asked.only or each.name in asked.only:
                try:
                    yield _run(each, checkout.resolve())
                except subprocess.TimeoutExpired:
                    yield f"| {each.name} | | took more than {PATIENCE} s | | | |"


def main() -> None:
    """Run all, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=Path, help="a checkout of pytorch/examples")
    parser.add_argument("--lightning", type=Path, help="a checkout of Lightning's repository")
    parser.add_argument("--only", nargs="*", default=())
    asked = parser.parse_args()
    lines = [
        "| script | steps | it ended | the run's time | usual steps | slow steps |",
        "|---|--:|---|---|---|---|",
    ]
    for row in _rows(asked):
        print(row, flush=True)
        lines.append(row)
    if not asked.only and asked.examples and asked.lightning:
        record(
            "watched.py",
            "Scripts that were not written for lflops",
            [*lines, "", "Not run on CUDA."],
        )


if __name__ == "__main__":
    main()
