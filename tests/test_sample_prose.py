"""The sampler of prose finds what people read, and nothing else."""

from pathlib import Path

import pytest

import lflops
from tests.support.sample_prose import KINDS, sample


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_sample_again(kind: str) -> None:
    """And another seed gives another one."""
    first = sample(kind, 20, seed=1)
    assert 20 == len(first)
    assert first == sample(kind, 20, seed=1)
    assert first != sample(kind, 20, seed=2)


def test_messages_are_read_from_code_and_from_tables() -> None:
    """Python strings and TOML texts, but no docstrings."""
    found = sample("messages", 100_000, seed=0)
    assert {".py", ".toml"} == {each.path.suffix for each in found}
    assert lflops.__doc__ not in {each.text for each in found}


def test_sentences_come_from_pages_and_the_readme() -> None:
    """Without code blocks: no sentence imports the package."""
    found = sample("sentences", 100_000, seed=0)
    assert {Path("README.md"), Path("docs/index.md")} <= {each.path for each in found}
    assert not [each for each in found if each.text.startswith("import lflops")]
