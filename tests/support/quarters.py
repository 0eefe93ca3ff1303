"""Move traces to other times within a quarter of a year.

Kineto counts times from the beginning of the quarter. Times are calculated exactly with decimals,
and without the trace reader of the package.
"""

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

# Durations in microseconds.
SECOND = 1_000_000
DAY = 86_400 * SECOND

MOMENTS = {
    "a second": SECOND,
    "45 days": 45 * DAY,
    "51 and a half": 51 * DAY + DAY // 2,
    "91 days": 91 * DAY,
}
"""Microseconds since the beginning of a quarter, which has 91.3 days.

After 2^42 µs, or 50.9 days, neighboring floats of microseconds are 1/1024 µs apart, so times that
are computed from them are wrong by a nanosecond. Before 2^52 ns, or 52.1 days, floats of
nanoseconds can have halves, so even 1000 times a float of microseconds is wrong. The third moment
is between these two.
"""


def exact(path: Path) -> dict[str, Any]:
    """Read a trace, compressed or not, with times as decimals."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    content: dict[str, Any] = json.loads(text, parse_float=Decimal)
    return content


def write(content: dict[str, Any], path: Path) -> None:
    """Write a trace with all digits of its decimals. It is compressed if the path ends in `.gz`."""
    text = msgspec.json.Encoder(decimal_format="number").encode(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def moved(content: dict[str, Any], moment: int) -> dict[str, Any]:
    """Return a trace of the same events in which the first slice begins at another moment.

    The base time of the trace moves in the other direction, so the absolute times stay the same.

    Args:
        content: The trace.
        moment: Microseconds since the beginning of the quarter.
    """
    shift = moment - min(event["ts"] for event in content["traceEvents"] if event["ph"] == "X")
    events = []
    for event in content["traceEvents"]:
        shifted = dict(event)
        if "ts" in event:
            shifted["ts"] = event["ts"] + shift
        events.append(shifted)
    return content | {
        "traceEvents": events,
        "baseTimeNanoseconds": content["baseTimeNanoseconds"] - int(shift * 1000),
    }


def span(event: dict[str, Any], base: int = 0) -> tuple[int, int]:
    """Return the start and the end of an event in nanoseconds, and check that they are integers."""
    start, start_fraction = divmod(Decimal(event["ts"]) * 1000, 1)
    length, length_fraction = divmod(Decimal(event["dur"]) * 1000, 1)
    assert 0 == start_fraction == length_fraction
    return base + int(start), base + int(start + length)
