"""A search of all objects that are alive ends in time."""

import pytest

from lflops import garbage
from lflops.collect.kineto.tracer import other_profiler_runs
from lflops.garbage import SearchTimeout, alive


class Sought:
    """What is searched for."""


class Claims:
    """Says that it is of another class, as a proxy does."""

    __class__ = Sought  # type: ignore[assignment]


def test_objects_of_a_class_are_found() -> None:
    """Of exactly this class: no proxy is asked."""
    here, proxy = Sought(), Claims()
    assert isinstance(proxy, Sought)  # the planted culprit
    assert [here] == list(alive({Sought}))


def test_a_search_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not known then is taken for the worse: that another profiler runs, next to which ours must not begin."""
    assert not other_profiler_runs()
    monkeypatch.setattr(garbage, "LONGEST", -1.0)
    with pytest.raises(SearchTimeout):
        list(alive({Sought}))
    assert other_profiler_runs()
