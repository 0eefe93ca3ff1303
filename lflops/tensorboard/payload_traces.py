"""Read the list of trace files in a payload, the JSON that the LFLOPS tab shows for a window."""

import msgspec
from msgspec import Raw, Struct

_LONGEST = 1 << 20
"""Maximum size in bytes of the list of traces, which has one file for each rank."""


class _Traces(Struct):
    traces: Raw = Raw(b"[]")


class _Trace(Struct):
    file: str = ""


def trace_file(payload: bytes, index: int) -> str:
    """Return the path of the trace file at an index of the payload's list of traces.

    The result is empty if this entry has no path. Only the list is decoded, because the rest of a
    payload may be large.

    Raises:
        LookupError: The list has no such entry.
    """
    try:
        listed = msgspec.json.decode(payload, type=_Traces).traces
        entries: list[Raw] = []
        if len(bytes(listed)) < _LONGEST:
            entries = msgspec.json.decode(listed, type=list[Raw])
    except (msgspec.DecodeError, RecursionError):
        entries = []
    if index >= len(entries):
        raise LookupError("the profiled window has no trace with this number")
    try:
        return msgspec.json.decode(entries[index], type=_Trace).file
    except (msgspec.DecodeError, RecursionError):
        return ""
