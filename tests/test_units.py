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
    """Half of the last decimal rounds up, into the next prefix if need be.

    Below 1000 an integer is exact; unknown is no 0.
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
    """438,053,888 = 417.76 * 2**20; one byte less than a MiB is 1024.00 KiB, so 1.00 MiB."""
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
    """Seconds stay seconds, however many: they are what rates are made of."""
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
    """0.04 % has no decimal to stand on, but is not nothing."""
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
    """It is as noisy as the time that it is made of."""
    assert text == units.rate(value)


def test_a_rate_above_the_peak_is_marked() -> None:
    """No chip computes faster than it can."""
    assert ["3.00 T", "3.01 T (over the peak)", "3.01 T", "–"] == [
        *(units.rate(value, peak=3e12) for value in (3e12, 3.01e12)),
        units.rate(3.01e12, peak=None),
        units.rate(None, peak=3e12),
    ]


def test_an_amount_has_its_prefix_before_its_unit() -> None:
    """312 * 10**12, with the decimals that are asked for."""
    assert ["312.00 TFLOP/s", "312 TFLOP/s", "12 FLOP/s", "0 FLOP/s"] == [
        units.quantity(312e12, "FLOP/s"),
        units.quantity(312e12, "FLOP/s", digits=0),
        units.quantity(12, "FLOP/s"),
        units.quantity(0, "FLOP/s"),
    ]


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.415, "41.5 %"), (1.0, "100.0 %"), (5.4, "540.0 % (over the peak)"), (None, "–")],
)
def test_more_than_the_peak_is_marked(share: float | None, text: str) -> None:
    """What cannot be says so."""
    assert text == units.of_peak(share)
