"""Whether graphs are recorded as they are compiled, so that a trace of them can be divided over modules."""

import threading
from collections.abc import Callable, Iterable

from lflops.collect.kineto.compiled_graph import GraphKernels
from lflops.errors import CountError

__all__ = ["CompileTracking", "recorded_graphs"]


class CompileTracking:
    """Records every graph that is compiled between `start` and `stop`. It changes inductor's settings, and restores them.

    The settings are those of the process: the first user sets them and the last restores them.

    Attributes:
        refusal: Why no graph is recorded; `None` while they are.
    """

    _lock = threading.Lock()
    _users = 0
    _restore: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.refusal: str | None = None
        self._runs = False

    def start(self) -> None:
        """Begin to record; where this torch does not offer what that takes, `refusal` says so."""
        try:
            from lflops.collect.torch_private.self_check import check_inductor

            check_inductor()
            from lflops.collect.torch_private.inductor import record_graphs

            with self._lock:
                if CompileTracking._restore is None:
                    CompileTracking._restore = record_graphs()
                CompileTracking._users += 1
                self._runs = True
        except CountError as error:
            self.refusal = str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not to end the user's training
            self.refusal = f"{type(error).__name__}: {error}"

    def stop(self) -> None:
        """End it, if it has begun; what is compiled by now keeps its record."""
        with self._lock:
            if not self._runs:
                return
            self._runs = False
            CompileTracking._users -= 1
            if not CompileTracking._users and CompileTracking._restore is not None:
                restore, CompileTracking._restore = CompileTracking._restore, None
                restore()


def recorded_graphs(keys: Iterable[str]) -> dict[str, GraphKernels]:
    """The graphs with these keys that have a record."""
    try:
        from lflops.collect.torch_private.inductor import compiled_graphs
    except CountError:
        return {}
    graphs: dict[str, GraphKernels] = {}
    for graph in compiled_graphs(keys):
        kernels = GraphKernels.of(graph.calls, graph.nodes, graph.record)
        if kernels is not None:
            graphs[graph.key] = kernels
    return graphs
