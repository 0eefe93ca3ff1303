"""A search of all objects that are alive ends in time."""

import pytest
from torch import nn

from lflops import garbage
from lflops.garbage import SearchTimeout, alive
from lflops.model.module_tree import ModuleTree
from lflops.trace.record.tracer import Tracer


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
    """What is not known then is taken for the worse.

    That another profiler runs, next to which ours must not begin.
    """
    monkeypatch.setattr(garbage, "LONGEST", -1.0)
    with pytest.raises(SearchTimeout):
        list(alive({Sought}))
    tracer = Tracer(ModuleTree({"": nn.Linear(1, 1)}))
    assert (False, "not_known") == (tracer.begin(), tracer.refusal)
