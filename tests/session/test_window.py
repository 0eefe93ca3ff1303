"""Which steps a window takes, and how many after its end are hooked where those in it cannot tell."""

from typing import Any

from lflops.session.window.step_clock import TimedStep
from lflops.session.window.window import Window

END = 10


def step(ordinal: int, *, hooked: bool) -> TimedStep:
    """A whole step."""
    fields: dict[str, Any] = {"times_phases": True, "device_marks": ([], [], 0.0), "shapes": (), "cpu": None}
    fields |= {"samples": None, "tokens": None}
    return TimedStep(ordinal=ordinal, logged_step=ordinal, hooked=object() if hooked else None, **fields)  # type: ignore[arg-type]


def test_further_hooked_steps_are_waited_for() -> None:
    """Three in it and five after it, then four more twice: sixteen are the most. A clean step among them is none of them."""
    window = Window(0, 0)
    for ordinal in range(END):
        window.opened = ordinal >= 5
        window.add(step(ordinal, hooked=ordinal >= 7))
    window.end(END, END - 1)
    ordinal, waited = END, []
    assert window.ready
    while more := window.more_hooked:
        waited.append(more)
        window.hook(ordinal, more)
        assert not window.ready
        for each in range(ordinal, ordinal + more):
            assert window.hooks(each)
            window.add(step(each, hooked=True))
        ordinal += more
        assert window.ready
        assert not window.hooks(ordinal)
    assert [5, 4, 4] == waited


def test_a_window_without_hooked_steps_wants_none() -> None:
    """None was asked for."""
    window = Window(0, 0)
    window.add(step(0, hooked=False))
    assert 0 == window.more_hooked


def test_the_next_window_takes_no_step_that_is_hooked_for_the_last_one() -> None:
    """It still waits."""
    following = Window(1, END)
    following.add(step(END, hooked=True))
    following.add(step(END + 1, hooked=False))
    assert [END + 1] == [each.ordinal for each in following._wait_steps]
