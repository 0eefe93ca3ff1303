"""Serve the LFLOPS tab of TensorBoard with the data in event files and trace files.

TensorBoard imports this module when it starts, and an error of the import would stop TensorBoard.
So the module imports no third-party package except TensorBoard, and reads data only on a request.

A window is a few profiled steps. A run, a tag and a step identify it. Its stored value, which
TensorBoard calls a datum, contains the payload (the JSON that the tab shows for the window).
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import parse_qs
from wsgiref.util import FileWrapper

from tensorboard import context as request_context  # type: ignore[import-untyped]
from tensorboard.backend import experiment_id  # type: ignore[import-untyped]
from tensorboard.data.provider import RunTagFilter  # type: ignore[import-untyped]
from tensorboard.plugins.base_plugin import FrontendMetadata, TBPlugin  # type: ignore[import-untyped]

from lflops.files import open_file, read, size_of
from lflops.tensorboard.payload_event import (
    PLUGIN,
    head,
    inflated,
    metadata_problem,
    packed,
    unpacked,
)

# URL paths of the page's script (which contains all modules that it imports) and style sheet.
_ENTRY = "/entry/tensorboard.js"
_STYLE = "/shell/style.css"
# Maximum number of steps to read: more than TensorBoard keeps, so all steps are read.
_ALL = 1_000_000
# Number of bytes of a trace that are sent at once.
_CHUNK = 1 << 20
# Maximum number of parts of a datum: the payload of a window, and its timeline if it has one.
_PARTS = 2
_NOT_FOUND = "TensorBoard has no such profiled window"
_NO_FOLDER = f"{_NOT_FOUND}, or was started without a log directory"

_MISSING = "404 Not Found"
_FORBIDDEN = "403 Forbidden"
_UNREADABLE = "422 Unprocessable Entity"

_Answer = Iterable[bytes]
_Start = Callable[[str, list[tuple[str, str]]], object]
_App = Callable[[dict[str, Any], _Start], _Answer]
# The reason why a window cannot be shown (empty if the window can be shown), and the head of its
# payload, which the list of windows shows.
_Status = tuple[str, dict[str, Any]]


class Tab(TBPlugin):  # type: ignore[misc]
    """The LFLOPS tab as a plugin that TensorBoard finds by its entry point."""

    plugin_name = PLUGIN

    def __init__(self, context: Any) -> None:
        self._data = context.data_provider
        self._logdir = Path(context.logdir).expanduser() if context.logdir else None
        self._statuses: dict[tuple[object, ...], _Status] = {}

    def get_plugin_apps(self) -> dict[str, _App]:
        apps: dict[str, _App] = {
            _ENTRY: _script,
            _STYLE: _style,
            "/windows": self._windows,
            "/window": partial(self._part, 0, unpacked),
            "/timeline": partial(self._part, 1, inflated),
            "/compare": self._compare,
            "/trace": self._trace,
            "/run": self._run,
        }
        return {path: partial(_unless_foreign, app) for path, app in apps.items()}

    def is_active(self) -> bool:
        """Return `False`. TensorBoard itself then finds out whether there is data to show."""
        return False

    def frontend_metadata(self) -> Any:
        return FrontendMetadata(es_module_path=_ENTRY, tab_name="LFLOPS")

    def _windows(self, environ: dict[str, Any], start: _Start) -> _Answer:
        """Answer with all windows that can be shown, in chronological order.

        For each window that cannot be shown, the answer has the reason.
        """
        windows = []
        problems = []
        for run, tag, datum, (problem, shown) in self._logged(environ):
            if problem:
                problems.append(f"{_title(run, tag, datum)} {problem}")
            elif datum is not None:
                windows.append(
                    {
                        "run": run,
                        "tag": tag,
                        "step": datum.step,
                        "wall_time": datum.wall_time,
                        "head": shown,
                    }
                )
        windows.sort(key=lambda window: window["wall_time"])
        body = json.dumps({"windows": windows, "problems": problems}).encode()
        return _answer(start, "200 OK", "application/json", body)

    def _logged(self, environ: dict[str, Any]) -> Iterator[tuple[str, str, Any, _Status]]:
        """Yield the run, tag, datum and status of each window.

        For a tag that cannot be read, yield only one tuple, with `None` instead of a datum.
        """
        experiment = environ.get(experiment_id.WSGI_ENVIRON_KEY, "")
        listed = self._data.list_tensors(
            request_context.from_environ(environ), experiment_id=experiment, plugin_name=PLUGIN
        )
        for run, tags in sorted(listed.items()):
            for tag, series in sorted(tags.items()):
                problem = metadata_problem(series.plugin_content)
                if problem:
                    yield run, tag, None, (problem, {})
                    continue
                for _, datum in self._read(environ, run, tag):
                    key = (experiment, run, tag, datum.step, datum.wall_time)
                    if key not in self._statuses:
                        self._statuses[key] = _status(datum)
                    yield run, tag, datum, self._statuses[key]

    def _part(
        self, index: int, inflate: Callable[[Any], bytes], environ: dict[str, Any], start: _Start
    ) -> _Answer:
        """Answer with the payload of the requested window, or with its timeline.

        `index` is 0 for the payload and 1 for the timeline. `inflate` decompresses this part.
        """
        window = self._requested(environ, _parameters(environ))
        if window is None:
            return _refused(start, _MISSING, _NOT_FOUND)
        value = _value(window[1], index)
        if index and value is None:
            return _refused(start, _MISSING, "this window has no timeline")
        try:
            return _json(environ, start, inflate(value), value)
        except ValueError as error:
            return _refused(start, _UNREADABLE, f"this window {error}")

    def _compare(self, environ: dict[str, Any], start: _Start) -> _Answer:
        """Answer with the comparison of two windows.

        The parameters of the request are `before_run`, `before_tag` and `before_step` for the first
        window, and `run`, `tag` and `step` for the second window.
        """
        # This loads msgspec, which TensorBoard does not need to start.
        from lflops.report.payload.compare import compared_windows

        parameters = _parameters(environ)
        payloads = []
        for prefix in ("before_", ""):
            asked = {name: parameters.get(prefix + name, "") for name in ("run", "tag", "step")}
            window = self._requested(environ, asked)
            if window is None:
                return _refused(start, _MISSING, _NOT_FOUND)
            try:
                payloads.append(unpacked(_value(window[1])))
            except ValueError as error:
                title = _title(asked["run"], asked["tag"], window[1])
                return _refused(start, _UNREADABLE, f"{title} {error}")
        try:
            comparison = compared_windows(*payloads)
        except ValueError as error:
            return _refused(start, _UNREADABLE, f"these windows {error}")
        return _json(environ, start, comparison)

    def _run(self, environ: dict[str, Any], start: _Start) -> _Answer:
        """Answer with the data about the whole run to which the requested window belongs.

        The data come from the window itself and from the ledger (the run's time account) in the
        folder of the run.
        """
        # These load msgspec, which TensorBoard does not need to start.
        from lflops.ledger.ledger_file import ENDING
        from lflops.report.payload.payload import encoded_run

        window = self._requested(environ, _parameters(environ))
        if window is None or self._logdir is None:
            return _refused(start, _MISSING, _NO_FOLDER)
        root = self._logdir.resolve()
        run, datum = window
        folder = self._logdir / run / "lflops"
        for path in (folder, *folder.rglob(f"*{ENDING}")):
            if not path.resolve().is_relative_to(root):
                return _refused(
                    start, _FORBIDDEN, "the ledger is outside TensorBoard's log directory"
                )
        try:
            return _json(environ, start, encoded_run(unpacked(_value(datum)), folder))
        except ValueError as error:
            return _refused(start, _UNREADABLE, f"this window {error}")

    def _trace(self, environ: dict[str, Any], start: _Start) -> _Answer:
        """Answer with a trace file of the requested window.

        The request identifies the trace by its index, never by its path.
        """
        parameters = _parameters(environ)
        window = self._requested(environ, parameters)
        if window is None or self._logdir is None:
            return _refused(start, _MISSING, _NO_FOLDER)
        run, datum = window
        try:
            trace = opened(
                unpacked(_value(datum)),
                parameters.get("index", ""),
                self._logdir / run,
                self._logdir,
            )
        except LookupError as error:
            return _refused(start, _MISSING, str(error))
        except ValueError as error:
            return _refused(start, _FORBIDDEN, str(error))
        _begin(
            start,
            "200 OK",
            "application/octet-stream",
            trace.size,
            ("Content-Disposition", f'attachment; filename="{trace.name}"'),
        )
        return FileWrapper(trace.file, _CHUNK)

    def _requested(
        self, environ: dict[str, Any], asked: Mapping[str, str]
    ) -> tuple[str, Any] | None:
        """Return the name of the requested run, and the datum of the requested tag and step.

        Return `None` if there is no such datum.
        """
        for run, datum in self._read(environ, asked.get("run", ""), asked.get("tag", "")):
            if str(datum.step) == asked.get("step"):
                return run, datum
        return None

    def _read(self, environ: dict[str, Any], run: str, tag: str) -> list[tuple[str, Any]]:
        """Return a pair of the run's name and a datum for each step of a run and a tag.

        The list is empty if the tag does not exist.
        """
        logged = self._data.read_tensors(
            request_context.from_environ(environ),
            experiment_id=environ.get(experiment_id.WSGI_ENVIRON_KEY, ""),
            plugin_name=PLUGIN,
            run_tag_filter=RunTagFilter(runs=[run], tags=[tag]),
            downsample=_ALL,
        )
        data = []
        for known, tags in logged.items():
            for datum in tags.get(tag, []):
                data.append((known, datum))
        return data


def _unless_foreign(app: _App, environ: dict[str, Any], start: _Start) -> _Answer:
    """Let `app` answer a request, but refuse a request that another site sent via the browser."""
    if environ.get("HTTP_SEC_FETCH_SITE", "same-origin") in {"same-origin", "none"}:
        return app(environ, start)
    return _refused(start, _FORBIDDEN, "the request came from another site")


def _parameters(environ: dict[str, Any]) -> dict[str, str]:
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    return {name: values[-1] for name, values in query.items()}


def _value(datum: Any, index: int = 0) -> Any:
    """Return the compressed payload (index 0) or timeline (index 1) in a datum, or `None`."""
    if index < datum.numpy.size <= _PARTS:
        return datum.numpy.item(index)
    return None


def _status(datum: Any) -> _Status:
    try:
        return "", head(_value(datum))
    except ValueError as error:
        return str(error), {}


def _title(run: str, tag: str, datum: Any) -> str:
    title = f"{tag} of run {run}"
    return title if datum is None else f"{title}, step {datum.step}"


def _script(_environ: dict[str, Any], start: _Start) -> _Answer:
    # TensorBoard does not need this import to start.
    from lflops.report.payload.page_script import page_script

    return _answer(
        start, "200 OK", "text/javascript; charset=utf-8", page_script("entry/tensorboard").encode()
    )


def _style(_environ: dict[str, Any], start: _Start) -> _Answer:
    sheet = Path(__file__).parents[1] / "page" / "shell" / "style.css"
    return _answer(start, "200 OK", "text/css; charset=utf-8", read(sheet))


def _answer(
    start: _Start, status: str, kind: str, body: bytes, *headers: tuple[str, str]
) -> _Answer:
    _begin(start, status, kind, len(body), *headers)
    return [body]


def _json(
    environ: dict[str, Any], start: _Start, body: bytes, deflated: bytes | None = None
) -> _Answer:
    """Answer with JSON, which is compressed with deflate if the browser accepts this encoding.

    `deflated` is the compressed body, if the caller already has it.
    """
    if "deflate" in environ.get("HTTP_ACCEPT_ENCODING", ""):
        body = packed(body) if deflated is None else deflated
        encoding = ("Content-Encoding", "deflate")
        return _answer(start, "200 OK", "application/json", body, encoding)
    return _answer(start, "200 OK", "application/json", body)


def _refused(start: _Start, status: str, why: str) -> _Answer:
    return _answer(start, status, "text/plain", why.encode())


def _begin(start: _Start, status: str, kind: str, size: int, *headers: tuple[str, str]) -> None:
    common = [
        ("Content-Type", kind),
        ("Content-Length", str(size)),
        ("X-Content-Type-Options", "nosniff"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        ("Cache-Control", "no-cache"),
    ]
    start(status, [*common, *headers])


_NAME = re.compile(r"[\w.-]+\.pt\.trace\.json(?:\.gz)?", re.ASCII)


class Opened(NamedTuple):
    """An open trace file with its name and its size in bytes."""

    file: BinaryIO
    name: str
    size: int


def opened(payload: bytes, index: str, run: Path, logdir: Path) -> Opened:
    """Open the file at the given index of a payload's list of traces.

    In the payload, the path of the file is relative to the folder `run`.

    Raises:
        LookupError: The list has no such trace, or the file does not exist or cannot be read.
        ValueError: The file is not a trace, or it is outside `logdir`, directly or through a link.
    """
    file = _named(payload, index)
    try:
        path = (run / file).resolve(strict=True)
        inside = path.is_relative_to(logdir.resolve())
    except (OSError, RuntimeError, ValueError):
        # The file does not exist, its links are circular, or its path is invalid.
        raise LookupError(
            "the trace does not exist, or is still being written in the background"
        ) from None
    if not inside or not _NAME.fullmatch(path.name):
        raise ValueError("the file is not a trace in TensorBoard's log directory")
    try:
        trace = open_file(path, follow_link=False)
    except OSError as error:
        raise LookupError(f"the trace cannot be read: {error.strerror}") from None
    return Opened(trace, path.name, size_of(trace))


def _named(payload: bytes, index: str) -> str:
    """Return the path of the trace at the given index of the payload."""
    # This loads msgspec, which TensorBoard does not need to start.
    from lflops.tensorboard.payload_traces import trace_file

    is_number = index.isascii() and index.isdecimal() and len(index) < 6
    if not is_number:
        raise LookupError("the profiled window has no trace with this number")
    file = trace_file(payload, int(index))
    if not _NAME.fullmatch(file.rpartition("/")[2]):
        raise ValueError("this window lists a file that is not a trace")
    return file
