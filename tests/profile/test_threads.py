"""Test that every type that two threads may decode at once is prepared at import.

msgspec crashes if two threads are both the first to decode a type.
"""

import pytest

from tests.support.warm_python import WarmPython

CALLS = """
import sys
from msgspec import Struct, msgpack
from msgspec._utils import get_class_annotations
from lflops.ranks.collect.report import Memory, PlacesOfTable, RankHeader, Table
from lflops.ledger.ledger_file import Line
from lflops.profile.profile import Profile
from lflops.profile.steps import Step
from lflops.report.payload.compare import _Window

class Planted(Struct):
    number: int

found = []
sys.setprofile(lambda frame, event, _: found.append(1) if event == "call" and frame.f_code is get_class_annotations.__code__ else None)
for kind in {kinds}:
    try:
        msgpack.decode(msgpack.encode([]), type=kind)
    except Exception:
        pass
sys.setprofile(None)
print(len(found))
"""
READ = "(Memory, PlacesOfTable, RankHeader, Table, Line, Profile, list[Step], _Window)"


@pytest.mark.parametrize(("kinds", "expected"), [(READ, 0), ("(Planted,)", 1)])
def test_no_thread_is_the_first_to_decode_a_type(
    kinds: str, expected: int, warm_python: WarmPython
) -> None:
    """For each type that several threads decode, msgspec has read its fields at import.

    The subprocess counts how often msgspec reads the fields of a class when a value is decoded. The
    class `Planted` is decoded for the first time there, so it must be counted once.
    """
    ended = warm_python.run(CALLS.replace("{kinds}", kinds))
    assert 0 == ended.status, ended.err
    assert str(expected) == ended.out.strip()
