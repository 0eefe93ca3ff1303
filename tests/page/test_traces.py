"""Test in a browser the links to the traces of a window."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from torch.utils.tensorboard import SummaryWriter

import lflops
from lflops.profile.records import Trace
from tests.support.browser import Seen
from tests.support.profile_builders import small_profile
from tests.support.tensorboard_server import Board, board

PERFETTO = "https://ui.perfetto.dev/"
TRACE = bytes(1000)
NAMES = ["host_0.7.pt.trace.json.gz", "host_1.8.pt.trace.json.gz"]
ANSWERS = """<script>
onmessage = ({ data, source, origin }) => {
  if (data === "PING") source.postMessage("PONG", origin);
  else document.body.textContent = `${data.perfetto.title}: ${data.perfetto.buffer.byteLength} bytes`;
};
</script><body></body>"""
"""A replacement for Perfetto's page, with the same protocol. It shows what it receives."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    """Start TensorBoard on a window with traces of two ranks, the second of which is missing."""
    logs = tmp_path_factory.mktemp("logs")
    files = {str(rank): str(logs / "run" / name) for rank, name in enumerate(NAMES)}
    (logs / "run").mkdir()
    Path(files["0"]).write_bytes(TRACE)
    with SummaryWriter(logs / "run") as writer:
        lflops.tensorboard.log(writer, replace(small_profile(), trace=Trace(files=files)), 8)
    with board(logs) as running:
        running.windows(expected=1)
        yield running


@pytest.fixture
def seen(server: Board, opening: Callable[..., Seen]) -> Seen:
    """Open the tab."""
    return opening(f"{server.address}#lflops")


def frame(seen: Seen) -> Any:
    """Return the frame of TensorBoard that contains the tab."""
    return seen.page.frame_locator("iframe")


def other_requests(server: Board, seen: Seen) -> list[str]:
    """Return the addresses of requests to other servers."""
    return [address for address in seen.asked if not address.startswith(server.address)]


def test_a_trace_is_saved_by_its_name(seen: Seen, server: Board) -> None:
    """A link downloads the trace unchanged, without a request to another server."""
    links = frame(seen).locator(".traces a")
    links.first.wait_for()
    assert NAMES == links.all_inner_texts()
    with seen.page.expect_download() as download:
        links.first.click()
    assert NAMES[0] == download.value.suggested_filename
    assert TRACE == Path(download.value.path()).read_bytes()
    assert [] == other_requests(server, seen)


def test_perfetto_is_asked_for_on_a_click_and_is_given_the_trace(seen: Seen, server: Board) -> None:
    """Perfetto is requested only on a click, and receives the trace within the browser."""
    seen.page.route(
        f"{PERFETTO}**", lambda route: route.fulfill(content_type="text/html", body=ANSWERS)
    )
    button = frame(seen).get_by_role("button", name="open in Perfetto").first
    button.wait_for()
    assert [] == other_requests(server, seen)
    button.click()
    shown = frame(seen).frame_locator("iframe.perfetto").locator("body")
    shown.get_by_text(f"{NAMES[0]}: 1000 bytes").wait_for()
    frame(seen).get_by_text(f"Waiting for {PERFETTO}").wait_for(state="hidden")
    assert [PERFETTO] == other_requests(server, seen)


def test_a_trace_that_is_not_there_is_said_not_to_be(seen: Seen, server: Board) -> None:
    """For a missing trace, the page shows the reason and does not request Perfetto."""
    frame(seen).get_by_role("button", name="open in Perfetto").nth(1).click()
    frame(seen).get_by_text(
        "This trace cannot be shown: the trace does not exist, or is still being written"
    ).wait_for()
    assert [] == other_requests(server, seen)


def test_the_page_from_disk_says_where_the_traces_are(page_of: Callable[..., Seen]) -> None:
    """A page from disk lists the paths of the traces, without links, and requests no server."""
    seen = page_of(replace(small_profile(), trace=Trace(files={"0": "/logs/a.pt.trace.json.gz"})))
    assert ["rank 0: /logs/a.pt.trace.json.gz"] == seen.page.locator(".traces li").all_inner_texts()
    assert 0 == seen.page.locator(".traces a, .traces button").count()
    assert [] == [address for address in seen.asked if not address.startswith("file:")]
