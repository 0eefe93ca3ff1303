"""Move traces to other times within the quarter of a year at which Kineto's times begin.

Times are calculated exactly with decimals, and without the trace reader of the package.
"""

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

SECOND = 1_000_000
DAY = 86_400 * SECOND
"""In microseconds."""

MOMENTS = {
    "a second": SECOND,
    "45 days": 45 * DAY,
    "51 and a half": 51 * DAY + DAY // 2,
    "91 days": 91 * DAY,
}
"""Into a quarter, which has 91.3 days.

From 2^42 µs on, 50.9 days, floats of microseconds are 1/1024 µs apart, and what is computed from
them is off by a nanosecond. Up to 2^52 ns, 52.1 days, even a product with 1000 is: floats of
nanoseconds are halves there.
"""


def exact(path: Path) -> dict[str, Any]:
    """What is in a trace, packed or not; times are decimals."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    content: dict[str, Any] = json.loads(text, parse_float=Decimal)
    return content


def write(content: dict[str, Any], path: Path) -> None:
    """A trace, packed or not, with the decimals in full."""
    text = msgspec.json.Encoder(decimal_format="number").encode(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def moved(content: dict[str, Any], moment: int) -> dict[str, Any]:
    """The same events, as they are written where the first comes so many microseconds after the quarter's beginning."""
    shift = moment - min(event["ts"] for event in content["traceEvents"] if event["ph"] == "X")
    events = [
        event | ({"ts": event["ts"] + shift} if "ts" in event else {})
        for event in content["traceEvents"]
    ]
    return content | {
        "traceEvents": events,
        "baseTimeNanoseconds": content["baseTimeNanoseconds"] - int(shift * 1000),
    }


def span(event: dict[str, Any], base: int = 0) -> tuple[int, int]:
    """Start and end in nanoseconds. It fails where a time has a fraction of one."""
    (start, above), (length, below) = (
        divmod(Decimal(event[key]) * 1000, 1) for key in ("ts", "dur")
    )
    assert 0 == above == below
    return base + int(start), base + int(start + length)
