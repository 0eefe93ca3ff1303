"""Test the search for live objects of a class."""

import pytest
from torch import nn

from lflops import garbage
from lflops.garbage import SearchTimeout, alive
from lflops.model.module_tree import ModuleTree
from lflops.trace.record.tracer import Tracer


class Sought:
    """The class that the tests search for."""


class Claims:
    """A class whose instances pretend to be of another class, as proxies do."""

    __class__ = Sought  # type: ignore[assignment]


def test_objects_of_a_class_are_found() -> None:
    """Only objects of exactly the class are found, and no proxies.

    `isinstance` would also accept the proxy.
    """
    here = Sought()
    proxy = Claims()
    assert isinstance(proxy, Sought)
    assert [here] == list(alive({Sought}))


def test_a_search_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that takes longer than `LONGEST` raises `SearchTimeout`.

    Then the tracer cannot know whether another profiler is running, so it does not start.
    """
    monkeypatch.setattr(garbage, "LONGEST", -1.0)
    with pytest.raises(SearchTimeout):
        list(alive({Sought}))
    tracer = Tracer(ModuleTree({"": nn.Linear(1, 1)}))
    assert (False, "not_known") == (tracer.begin(), tracer.refusal)
