"""Profiles that two threads read at once.

Msgspec crashes where both are the first to decode a type.
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
    """Whatever several threads of ours decode was worked out when its module was loaded.

    A type that was not would be seen.
    """
    ended = warm_python.run(CALLS.replace("{kinds}", kinds))
    assert 0 == ended.status, ended.err
    assert str(expected) == ended.out.strip()
