"""Test how numbers, bytes, durations, shares and rates are shown."""

import math

import pytest

from lflops import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (1000, "1.00 k"),
        (1_234_567_890, "1.23 G"),
        (999_994, "999.99 k"),
        (999_995, "1.00 M"),
        (10**15, "1.00 P"),
        (999_994 * 10**27, "999.99 Q"),
        (10**33, "1.00e+33"),
        (10**400, "1.00e+400"),
        (-1_500, "-1.50 k"),
        (2.5, "2.50"),
        (950.0, "950"),
        (-0.0, "0"),
        (0.004, "4.00e-3"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "–"),
    ],
)
def test_a_count_has_two_decimals_and_the_prefix_that_its_rounded_value_needs(
    value: float | None, text: str
) -> None:
    """A count is rounded half up, which may lead to the next prefix.

    Integers below 1000 are exact. An unknown count is not shown as 0.
    """
    assert text == units.count(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (438_053_888, "417.76 MiB"),
        (1024**2 - 1, "1.00 MiB"),
        (80 * 1024**3, "80.00 GiB"),
        (1024**9, "1.24e+27 B"),
        (None, "–"),
    ],
)
def test_bytes_are_in_binary_units(value: float | None, text: str) -> None:
    """Bytes are divided by powers of 1024: 438,053,888 bytes are 417.76 * 2**20 bytes.

    One byte less than a MiB is rounded to 1024.00 KiB, so it is shown as 1.00 MiB.
    """
    assert text == units.size(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (0.07667, "76.7 ms"),
        (1.5e-6, "1.50 µs"),
        (3e-9, "3.00 ns"),
        (0.0099951, "10.0 ms"),
        (0.09996, "100 ms"),
        (0.0009996, "1.00 ms"),
        (4e-12, "4.00e-3 ns"),
        (0.9999951, "1.00 s"),
        (1, "1.00 s"),
        (5400, "5400 s"),
        (None, "–"),
    ],
)
def test_a_duration_has_the_unit_below_it(value: float | None, text: str) -> None:
    """Seconds are the largest unit, because rates are per second."""
    assert text == units.duration(value)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0 %"),
        (0.415, "41.5 %"),
        (1, "100.0 %"),
        (0.0005, "0.1 %"),
        (0.0004, "<0.1 %"),
        (-0.0004, ">-0.1 %"),
        (None, "–"),
    ],
)
def test_a_share_is_in_percent_and_reads_0_only_where_it_is(share: float | None, text: str) -> None:
    """Only a share of exactly 0 is shown as "0 %": 0.04 % is shown as "<0.1 %"."""
    assert text == units.percent(share)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (43.94, "43.9"),
        (999.4, "999"),
        (999.6, "1.00 k"),
        (5617.6, "5.62 k"),
        (0.012, "0.01"),
        (10**33, "1000 Q"),
        (None, "–"),
    ],
)
def test_a_rate_has_three_digits(value: float | None, text: str) -> None:
    """A rate has only three digits, because the time in it is noisy."""
    assert text == units.rate(value)


def test_a_rate_above_the_peak_is_marked() -> None:
    """No chip computes faster than its peak, so a higher rate is marked."""
    assert "3.00 T" == units.rate(3e12, peak=3e12)
    assert "3.01 T (over the peak)" == units.rate(3.01e12, peak=3e12)
    assert "3.01 T" == units.rate(3.01e12, peak=None)
    assert "–" == units.rate(None, peak=3e12)


def test_an_amount_has_its_prefix_before_its_unit() -> None:
    """The prefix comes before the unit, and the caller chooses the number of decimals."""
    assert "312.00 TFLOP/s" == units.quantity(312e12, "FLOP/s")
    assert "312 TFLOP/s" == units.quantity(312e12, "FLOP/s", digits=0)
    assert "12 FLOP/s" == units.quantity(12, "FLOP/s")
    assert "0 FLOP/s" == units.quantity(0, "FLOP/s")


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.415, "41.5 %"), (1.0, "100.0 %"), (5.4, "540.0 % (over the peak)"), (None, "–")],
)
def test_more_than_the_peak_is_marked(share: float | None, text: str) -> None:
    """A share of the peak above 100 % is impossible, so it is marked."""
    assert text == units.of_peak(share)
