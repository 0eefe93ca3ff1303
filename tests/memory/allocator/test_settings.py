"""Test reading the text of `PYTORCH_ALLOC_CONF`."""

import pytest

from lflops.errors import CountError
from lflops.memory.allocator.settings import DEFAULT, AllocatorSettings, settings_of

MIB = 2**20


def test_a_text_is_read_as_torch_reads_it() -> None:
    """Names, booleans, MiB and shares are read as torch reads them.

    Settings that do not affect device memory are skipped.
    """
    text = "expandable_segments:True, max_split_size_mb:128,garbage_collection_threshold:0.6,per_process_memory_fraction:0.9,backend:native"
    expected = AllocatorSettings(
        expandable_segments=True,
        max_split_size=128 * MIB,
        garbage_collection_threshold=0.6,
        memory_fraction=0.9,
    )
    assert expected == settings_of(text)
    assert DEFAULT == settings_of("")


def test_divisions_are_one_number_or_a_list_by_size() -> None:
    """Divisions are one number for all sizes, or a list by size.

    The result has 16 powers of two from 1 MiB on. Sizes below 256 MiB have the number of 256, and
    sizes above the last one have the number of `>`.
    """
    assert (4,) * 16 == settings_of("roundup_power2_divisions:4").divisions
    assert (1,) * 9 + (2,) + (4,) + (8,) * 5 == settings_of(
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]"
    ).divisions


WRONG = {
    "unknown": (
        "max_split:128",
        "the setting 'max_split' is unknown: use one of expandable_segments",
    ),
    "no value": ("expandable_segments", "'expandable_segments' has no value: pass name:value"),
    "no truth": ("expandable_segments:yes", "expandable_segments=yes: pass True or False"),
    "too small": (
        "max_split_size_mb:20",
        "max_split_size_mb=20: pass a whole number of MiB, at least 21",
    ),
    "too small for rounding": (
        "max_non_split_rounding_mb:19",
        "max_non_split_rounding_mb=19: pass a whole number of MiB, at least 20",
    ),
    "no share": (
        "garbage_collection_threshold:2",
        "garbage_collection_threshold=2: pass a number between 0 and 1",
    ),
    "no power": ("roundup_power2_divisions:3", "roundup_power2_divisions=3: pass powers of two"),
}


@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_setting_is_named(text: str, said: str) -> None:
    """The error contains the wrong value and the accepted values."""
    with pytest.raises(CountError) as refused:
        settings_of(text)
    assert said in str(refused.value)
