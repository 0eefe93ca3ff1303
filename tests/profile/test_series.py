"""Test sums with unknown parts, and the choice of points when a long series is shortened."""

from lflops.profile.series import extremes, sum_known


def test_a_series_that_is_short_enough_is_whole() -> None:
    """A series of at most the given length keeps all its points."""
    assert [0, 1, 2, 3] == extremes([5, 1, 7, 2], 4)


def test_of_a_long_one_each_bucket_s_lowest_and_highest_stay() -> None:
    """A long series keeps the lowest and the highest point of each bucket.

    Of 12 values, at most 8 stay. Both ends and the requested point 5 take three of these places,
    and the other five are enough for two buckets of six values.
    """
    values = [3, 9, 0, 4, 5, 5, 5, 8, 7, 1, 2, 6]
    assert [0, 1, 2, 5, 7, 9, 11] == extremes(values, 8, [5])


def test_never_more_stay_than_there_is_room_for() -> None:
    """The result never has more points than requested, for any length of the series."""
    assert all(
        len(extremes(list(range(length, 0, -1)), 20, [length // 2])) <= 20
        for length in range(1, 300)
    )


def test_a_sum_with_an_unknown_part_is_unknown() -> None:
    """A sum with an unknown part is unknown; the sum of nothing is 0."""
    assert (6, 0.5, 0) == (sum_known([1, 2, 3]), sum_known([0.25, 0.25]), sum_known([]))
    assert sum_known([1, None, 3]) is None
