"""Handmade Kineto events, in the form that `recorded` accepts."""

from typing import NamedTuple


class Event(NamedTuple):
    """An event of Kineto.

    Attributes:
        name: The name.
        start: Its start in nanoseconds since 1970.
        end: Its end in nanoseconds since 1970.
        thread: The thread on which it began.
        number: For a backward node, the sequence number that it shares with its forward operator.
            For other operators, -1 or the sequence number of the next node.
        built_on: For a backward node, the thread that built it.
        is_named: Whether it is a named span rather than an operator.
        spans_threads: Whether it ended on another thread than it began on.
        is_on_device: Whether the device ran it.
        key: Number that identifies the event.
        link: For device work and runtime calls, the `key` of the operator that launched them; 0 if
            there is none.
    """

    name: str
    start: int
    end: int
    thread: int = 1
    number: int = -1
    built_on: int = 0
    is_named: bool = False
    spans_threads: bool = False
    is_on_device: bool = False
    key: int = 0
    link: int = 0
