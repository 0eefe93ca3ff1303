"""Test a snapshot that torch 2.11 recorded on an H100, while `benchmarks/gpu.py` ran.

In each step a hook keeps 256 MiB, and the process may use a twentieth of the device. The model has
four layers of width 1024 in float32, with AdamW, and fails in the ninth step. It has 4 * (4 *
1024**2 + 8 * 1024**2) weights, and biases. Only the paths in the recording were replaced.
"""

import gzip
from pathlib import Path

from lflops.memory.snapshots.explain import ExplainedMemory, explain, explained_lines
from lflops.memory.snapshots.read import read_snapshot

MIB = 2**20
WIDTH = 1024
WIDE = 4096
LAYERS = 4
FLOAT = 4
ATTENTION = 4 * WIDTH * WIDTH + 4 * WIDTH
PERCEPTRON = 2 * WIDTH * WIDE + WIDE + WIDTH
PARAMETERS = LAYERS * (ATTENTION + PERCEPTRON + 2 * 2 * WIDTH) * FLOAT
KEPT = 256 * MIB
STEPS = 9


def explained(folder: Path) -> ExplainedMemory:
    """Return the explanation of the recording."""
    path = folder / "snapshot.pickle"
    compressed = Path(__file__).with_name("h100_out_of_memory.pickle.gz")
    path.write_bytes(gzip.decompress(compressed.read_bytes()))
    return explain(read_snapshot(path))


def test_a_real_recording_has_its_steps_and_who_holds_what(tmp_path: Path) -> None:
    """The recording has eight whole steps and the forward of the ninth.

    The parameters are older than the recording, so their category is unknown.
    """
    found = explained(tmp_path)
    assert STEPS == found.forward_passes
    assert STEPS - 1 == found.optimizer_steps
    held = found.by_category
    assert 2 * PARAMETERS == held["optimizer_state"]
    assert PARAMETERS == held["gradients"]
    assert PARAMETERS == held["unknown"]
    (collected,) = (each for each in found.holders if "<lambda>" in each.line)
    assert STEPS * KEPT == collected.bytes
    assert STEPS == collected.count
    assert "activations" == collected.category


def test_its_first_line_names_the_limit_and_the_list(tmp_path: Path) -> None:
    """The first line names the process limit and the results that the hook keeps.

    The device had 68.90 GiB free, so no other process is the cause. Eight earlier passes left 256
    MiB each.
    """
    found = explained(tmp_path)
    assert ["process_limit", "kept_results"] == [each.code for each in found.causes[:2]]
    assert 0 <= found.causes[1].bytes - (STEPS - 1) * KEPT < 0.02 * STEPS * KEPT
    first = next(iter(explained_lines(found)))
    assert first.startswith(
        "This process reached its own memory limit, although the device had 68.90 GiB free."
    )
    assert "(train.py:383 <lambda>)" in first
