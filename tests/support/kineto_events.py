"""Handmade Kineto events, in the form that `recorded` accepts."""

from typing import NamedTuple


class Event(NamedTuple):
    """One of Kineto's, its times in nanoseconds since 1970."""

    name: str
    start: int
    end: int
    thread: int = 1
    number: int = (
        -1
    )  # of a node of backward: when it was built; of any other: -1, or the number of the next node
    built_on: int = 0  # of a node of backward: the thread that built it; 0 for any other
    is_named: bool = (
        False  # whether somebody named a stretch of time, rather than that an operator ran
    )
    spans_threads: bool = False  # whether it began on one thread and ended on another
    is_on_device: bool = False
    key: int = 0
    link: int = 0  # the `key` of the operator that it was done for, where it is the device's or the device's library's
