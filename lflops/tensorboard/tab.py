"""The LFLOPS tab: what TensorBoard's server answers to the page's questions, from the event files, and the traces that they name.

TensorBoard loads this file when it starts, outside of any `try`: so it needs nothing but TensorBoard, and reads nothing before it is asked.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs
from wsgiref.util import FileWrapper

from tensorboard import context as request_context  # type: ignore[import-untyped]
from tensorboard.backend import experiment_id  # type: ignore[import-untyped]
from tensorboard.data.provider import RunTagFilter  # type: ignore[import-untyped]
from tensorboard.plugins.base_plugin import FrontendMetadata, TBPlugin  # type: ignore[import-untyped]

from lflops.tensorboard.payload_event import PLUGIN, checked, misfit, trend
from lflops.tensorboard.traces import opened

__all__ = ["Tab"]

_PAGE = Path(__file__).parents[1] / "page"
_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
_ALL = 1_000_000
"""Steps of a summary: as many as TensorBoard has kept."""

_CHUNK = 1 << 20
"""Bytes of a trace that are sent at once."""

_Answer = Iterable[bytes]
_Start = Callable[[str, list[tuple[str, str]]], object]


class _Told(NamedTuple):
    """Why what was logged cannot be shown, or empty, and the figures that it is followed by."""

    problem: str
    trend: dict[str, float]


class Tab(TBPlugin):  # type: ignore[misc]
    """A dynamic plugin of TensorBoard.

    Args:
        context: TensorBoard's, with its data.
    """

    plugin_name = PLUGIN

    def __init__(self, context: Any) -> None:
        self._data = context.data_provider
        self._logdir = Path(context.logdir).expanduser() if context.logdir else None
        self._told: dict[tuple[object, ...], _Told] = {}

    def get_plugin_apps(self) -> dict[str, Callable[[dict[str, Any], _Start], _Answer]]:
        """The routes: the page's own files, each by its name, and the data."""
        files = {f"/{file.relative_to(_PAGE).as_posix()}": _file(file) for file in sorted(_PAGE.rglob("*.*")) if file.suffix in _TYPES}
        return files | {"/windows": self._windows, "/window": self._window, "/trace": self._trace}

    def is_active(self) -> bool:
        """TensorBoard itself sees from the data whether there is something to show."""
        return False

    def frontend_metadata(self) -> Any:
        """What the tab is called, and where its page begins."""
        return FrontendMetadata(es_module_path="/entry/tensorboard.js", tab_name="LFLOPS")

    def _windows(self, environ: dict[str, Any], start: _Start) -> _Answer:
        """What can be shown, the latest last, and what cannot, with the reason."""
        windows, problems = [], []
        for run, tag, datum, (problem, figures) in self._found(environ):
            at = "" if datum is None else f", step {datum.step}"
            if problem:
                problems.append(f"{tag} of run {run}{at} {problem}")
            elif datum is not None:
                windows.append({"run": run, "tag": tag, "step": datum.step, "wall_time": datum.wall_time, "trend": figures})
        windows.sort(key=lambda each: each["wall_time"])
        return _answer(start, "200 OK", "application/json", json.dumps({"windows": windows, "problems": problems}).encode())

    def _found(self, environ: dict[str, Any]) -> Iterator[tuple[str, str, Any, _Told]]:
        """Run, tag, what was logged at a step, and what there is to tell of it; without a step where none of them can be shown."""
        experiment = environ.get(experiment_id.WSGI_ENVIRON_KEY, "")
        listed = self._data.list_tensors(request_context.from_environ(environ), experiment_id=experiment, plugin_name=PLUGIN)
        for run, tags in sorted(listed.items()):
            for tag, series in sorted(tags.items()):
                if problem := misfit(series.plugin_content):
                    yield run, tag, None, _Told(problem, {})
                    continue
                for _, datum in self._read(environ, run, tag):
                    place = experiment, run, tag, datum.step, datum.wall_time
                    if place not in self._told:  # inflating it once is enough
                        self._told[place] = _told(datum)
                    yield run, tag, datum, self._told[place]

    def _window(self, environ: dict[str, Any], start: _Start) -> _Answer:
        """The payload of one window, deflated as it lies in the file where the browser takes that."""
        found = self._asked_for(environ, _asked(environ))
        if found is None:
            return _refused(start, "404 Not Found", "TensorBoard keeps no such window")
        value = _value(found[1])
        try:
            payload = checked(value)
        except ValueError as error:
            return _refused(start, "422 Unprocessable Entity", f"it {error}")
        if "deflate" in environ.get("HTTP_ACCEPT_ENCODING", ""):
            return _answer(start, "200 OK", "application/json", value, ("Content-Encoding", "deflate"))
        return _answer(start, "200 OK", "application/json", payload)

    def _trace(self, environ: dict[str, Any], start: _Start) -> _Answer:
        """A trace that a window's summary names. The request tells which, and no part of where."""
        asked = _asked(environ)
        found = self._asked_for(environ, asked)
        if found is None or self._logdir is None:
            return _refused(start, "404 Not Found", "TensorBoard keeps no such window, or has no log directory")
        run, datum = found
        try:
            trace = opened(checked(_value(datum)), asked.get("index", ""), self._logdir / run, self._logdir)
        except LookupError as error:
            return _refused(start, "404 Not Found", str(error))
        except ValueError as error:
            return _refused(start, "403 Forbidden", str(error))
        _begin(start, "200 OK", "application/octet-stream", trace.size, ("Content-Disposition", f'attachment; filename="{trace.name}"'))
        return FileWrapper(trace.file, _CHUNK)

    def _asked_for(self, environ: dict[str, Any], asked: Mapping[str, str]) -> tuple[str, Any] | None:
        """A run as TensorBoard calls it, and what was logged in it under that tag at that step; `None` where nothing was."""
        found = self._read(environ, asked.get("run", ""), asked.get("tag", ""))
        return next(((run, datum) for run, datum in found if str(datum.step) == asked.get("step")), None)

    def _read(self, environ: dict[str, Any], run: str, tag: str) -> list[tuple[str, Any]]:
        """What was logged under a tag, step by step, each with the run; nothing where there is no such tag."""
        found = self._data.read_tensors(
            request_context.from_environ(environ),
            experiment_id=environ.get(experiment_id.WSGI_ENVIRON_KEY, ""),
            plugin_name=PLUGIN,
            run_tag_filter=RunTagFilter(runs=[run], tags=[tag]),
            downsample=_ALL,
        )
        return [(known, datum) for known, tags in found.items() for datum in tags.get(tag, [])]


def _asked(environ: dict[str, Any]) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True).items()}


def _value(datum: Any) -> Any:
    return datum.numpy.item() if datum.numpy.size == 1 else None


def _told(datum: Any) -> _Told:
    try:
        return _Told("", trend(checked(_value(datum))))
    except ValueError as error:
        return _Told(str(error), {})


def _file(path: Path) -> Callable[[dict[str, Any], _Start], _Answer]:
    def serve(_environ: dict[str, Any], start: _Start) -> _Answer:
        return _answer(start, "200 OK", _TYPES[path.suffix], path.read_bytes())

    return serve


def _answer(start: _Start, status: str, kind: str, body: bytes, *headers: tuple[str, str]) -> _Answer:
    _begin(start, status, kind, len(body), *headers)
    return [body]


def _refused(start: _Start, status: str, why: str) -> _Answer:
    return _answer(start, status, "text/plain", why.encode())


def _begin(start: _Start, status: str, kind: str, size: int, *headers: tuple[str, str]) -> None:
    length, guard = ("Content-Length", str(size)), ("X-Content-Type-Options", "nosniff")
    start(status, [("Content-Type", kind), length, guard, ("Cache-Control", "no-cache"), *headers])
