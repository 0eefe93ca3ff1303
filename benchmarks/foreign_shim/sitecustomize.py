"""Watches other people's programs.

Python runs this file as it starts, where this folder is in PYTHONPATH.

`LFLOPS_SHIM` names the packages whose trainings are watched. They are changed as they are imported;
this file imports none of them. With `LFLOPS_SHIM_ELSEWHERE` a Trainer of transformers has no files
of the monitor's in its own folder.
"""

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

SHORT = {"wait": 0, "warmup": 1, "active": 1, "repeat": 2}
"""Windows that happen in trainings as short as tests have."""


class Accelerate:
    """Watches the models that `Accelerator.prepare` gives, through the loaders that it gives.

    A batch is a step of the loop.
    """

    monitor: Any = None

    @classmethod
    def change(cls, accelerator: ModuleType) -> None:
        """Wrap `prepare`, and how its loaders are gone through."""
        from accelerate import data_loader

        prepare = accelerator.Accelerator.prepare

        def prepared(engine: Any, *args: Any, **kwargs: Any) -> Any:
            made = prepare(engine, *args, **kwargs)
            cls.watch(engine, made if isinstance(made, tuple) else (made,))
            return made

        accelerator.Accelerator.prepare = prepared
        for loader in (data_loader.DataLoaderShard, data_loader.DataLoaderDispatcher):
            loader.__iter__ = cls.stepping(loader.__iter__)

    @classmethod
    def watch(cls, engine: Any, made: Sequence[Any]) -> None:
        """Begin to watch, if there is something that is trained; what was watched before is over."""
        from torch import nn
        from torch.optim import Optimizer

        import lflops

        models = [each for each in made if isinstance(each, nn.Module)]
        optimizers = [each for each in made if isinstance(each, Optimizer)]
        if not models:
            return
        cls.close()
        folder = tempfile.mkdtemp(prefix="lflops-")
        schedule, accumulation = (
            lflops.Schedule(**SHORT),
            max(int(engine.gradient_accumulation_steps), 1),
        )
        settings = {
            "schedule": schedule,
            "dirpath": folder,
            "log": _nothing,
            "accumulation": accumulation,
        }
        cls.monitor = lflops.monitor(
            {str(number): each for number, each in enumerate(models)},
            optimizers,
            engine=engine,
            **settings,
        )
        cls.monitor.__enter__()
        atexit.unregister(cls.close)
        atexit.register(
            cls.close
        )  # a profiler of torch that is not stopped ends the process by a signal

    @classmethod
    def close(cls) -> None:
        """Stop watching."""
        monitor, cls.monitor = cls.monitor, None
        if monitor is not None:
            monitor.__exit__(None, None, None)

    @classmethod
    def stepping(cls, iterate: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        """Go through a loader as its own iterator does, with a step around each batch."""

        def stepped(loader: Any) -> Iterator[Any]:
            for batch in iterate(loader):
                if cls.monitor is None:
                    yield batch
                else:
                    with cls.monitor.step(batch):
                        yield batch

        return stepped


class Transformers:
    """Gives each Trainer a callback."""

    @staticmethod
    def change(trainer: ModuleType) -> None:
        """Wrap what makes a Trainer."""
        make = trainer.Trainer.__init__

        def made(own: Any, *args: Any, **kwargs: Any) -> None:
            make(own, *args, **kwargs)
            import lflops
            from lflops.integrations.huggingface import FlopsCallback

            elsewhere = (
                {"dirpath": tempfile.mkdtemp(prefix="lflops-")}
                if "LFLOPS_SHIM_ELSEWHERE" in os.environ
                else {}
            )
            own.add_callback(
                FlopsCallback(schedule=lflops.Schedule(**SHORT), log=_one_more, **elsewhere)
            )

        trainer.Trainer.__init__ = made


def _nothing(_message: str) -> None:
    """Say nothing."""


def _one_more(_summary: str) -> None:
    """Note a window: tests remove the folders that its profile is in."""
    with Path(tempfile.gettempdir(), "windows").open("a", encoding="utf-8") as noted:
        noted.write(".")


CHANGES: dict[str, tuple[str, Callable[[ModuleType], None]]] = {
    "accelerate": ("accelerate.accelerator", Accelerate.change),
    "transformers": ("transformers.trainer", Transformers.change),
}
"""By package: the module that is changed as soon as it is loaded, and how."""


class _Loader(importlib.abc.Loader):
    """Loads a module as its own loader does, and then changes it."""

    def __init__(self, own: Any, change: Callable[[ModuleType], None]) -> None:
        self.own, self.change = own, change

    def create_module(self, spec: Any) -> Any:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.own.exec_module(module)
        self.change(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that are to be changed, and leaves all others to those behind it."""

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self.changes = changes

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in self.changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.changes[fullname])
        return spec


def _next_sitecustomize() -> None:
    """Run the one that would have been run in place of this file, if there is one."""
    others = [each for each in sys.path if Path(each).resolve() != Path(__file__).resolve().parent]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_next_sitecustomize()
_asked = [name for name in os.environ.get("LFLOPS_SHIM", "").split(",") if name]
if _asked:
    sys.meta_path.insert(0, _Finder(dict(CHANGES[name] for name in _asked)))
