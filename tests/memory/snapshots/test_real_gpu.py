"""A recording of an H100 by torch 2.11, of `benchmarks/gpu.py`.

Each step's hook keeps 256 MiB, in a process that may have a twentieth.

Four layers of 1024 wide in float32, AdamW, and the error comes in the ninth step: 4 * (4 * 1024**2
+ 8 * 1024**2) weights and their biases. Paths of that machine were replaced, and nothing else.
"""

import gzip
from pathlib import Path

from lflops.memory.snapshots.explain import ExplainedMemory, explain, explained_lines
from lflops.memory.snapshots.read import read_snapshot

MIB = 2**20
WIDTH, WIDE, LAYERS, FLOAT = 1024, 4096, 4, 4
ATTENTION = 4 * WIDTH * WIDTH + 4 * WIDTH
PERCEPTRON = 2 * WIDTH * WIDE + WIDE + WIDTH
PARAMETERS = LAYERS * (ATTENTION + PERCEPTRON + 2 * 2 * WIDTH) * FLOAT
KEPT, STEPS = 256 * MIB, 9


def explained(folder: Path) -> ExplainedMemory:
    """The recording's."""
    path = folder / "snapshot.pickle"
    path.write_bytes(
        gzip.decompress(Path(__file__).with_name("h100_out_of_memory.pickle.gz").read_bytes())
    )
    return explain(read_snapshot(path))


def test_a_real_recording_has_its_steps_and_who_holds_what(tmp_path: Path) -> None:
    """Eight whole steps and the forward of the ninth.

    The parameters were there before the recording began.
    """
    found = explained(tmp_path)
    assert (STEPS, STEPS - 1) == (found.forward_passes, found.optimizer_steps)
    held = found.by_category
    assert (2 * PARAMETERS, PARAMETERS, PARAMETERS) == (
        held["optimizer_state"],
        held["gradients"],
        held["unknown"],
    )
    (collected,) = (each for each in found.holders if "<lambda>" in each.line)
    assert (STEPS * KEPT, STEPS, "activations") == (
        collected.bytes,
        collected.count,
        collected.category,
    )


def test_its_first_line_names_the_limit_and_the_list(tmp_path: Path) -> None:
    """68.90 GiB of the device were free, so nobody else is to blame.

    Eight passes have left their 256 MiB.
    """
    found = explained(tmp_path)
    assert ["process_limit", "kept_results"] == [each.code for each in found.causes[:2]]
    assert 0 <= found.causes[1].bytes - (STEPS - 1) * KEPT < 0.02 * STEPS * KEPT
    first = next(iter(explained_lines(found)))
    assert first.startswith("This process reached its own limit: the device had 68.90 GiB free.")
    assert "(train.py:383 <lambda>)" in first
