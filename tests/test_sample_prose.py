"""Test that the sampler of prose finds only texts that people read."""

from pathlib import Path

import pytest

import lflops
from tests.support.sample_prose import KINDS, sample


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_sample_again(kind: str) -> None:
    """The same seed returns the same sample, and another seed returns another sample."""
    first = sample(kind, 20, seed=1)
    assert 20 == len(first)
    assert first == sample(kind, 20, seed=1)
    assert first != sample(kind, 20, seed=2)


def test_messages_are_read_from_code_and_from_tables() -> None:
    """Messages come from strings in Python and TOML files, not from docstrings."""
    found = sample("messages", 100_000, seed=0)
    assert {".py", ".toml"} == {each.path.suffix for each in found}
    assert lflops.__doc__ not in {each.text for each in found}


def test_sentences_come_from_pages_and_the_readme() -> None:
    """Sentences come from the documentation and the README, without their code blocks.

    A sentence that begins with `import lflops` would come from a code block.
    """
    found = sample("sentences", 100_000, seed=0)
    assert {Path("README.md"), Path("docs/index.md")} <= {each.path for each in found}
    assert not [each for each in found if each.text.startswith("import lflops")]
