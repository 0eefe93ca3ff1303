"""Your own loop, with `lflops.monitor`: alone, with Accelerate, with Fabric."""

import contextlib
import copy
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

import lflops
from tests.harmless.case import Case, Facts, Watch
from tests.harmless.culprits import Culprit
from tests.harmless.facts import (
    Recorder,
    around,
    attributes,
    checkpoints,
    digest,
    of_modules,
    of_optimizers,
    says,
)
from tests.harmless.tasks import TASKS, Loads, Net

__all__ = ["TRAITS", "run"]

BATCHES = 12

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
}

TRAITS = {
    *OPTIMIZERS,
    *TASKS,
    "accumulated",
    "clipped",
    "scheduled",
    "autocast",
    "scaled gradients",
    "validated",
    "evaluated in inference mode",
    "raises",
    "KeyboardInterrupt",
    "SystemExit",
    "left early",
    "two monitors",
    "watched twice",
    "never left",
    "compiled: eager",
    "compiled: aot_eager",
    "compiled module: eager",
    "global module hooks",
    "global hook that replaces",
    "module hooks",
    "hook with kwargs",
    "hook that raises",
    "tensor hooks",
    "optimizer hooks",
    "own dispatch mode",
    "saved tensors hooks",
    "anomaly mode",
    "deterministic",
    "copied on the way",
    "pickled on the way",
    "saved on the way",
    "frozen on the way",
    "replaced on the way",
    "moving average",
    "on a thread",
    "two models",
    "gradient kept in place",
    "no batch given",
    "generator of batches",
    "FSDP2",
    "tensor parallel",
    "no_sync",
    "static graph",
    "unused parameters",
    "gathered losses",
    "curves",
    "measured peaks",
}
"""What a case may say of its loop."""


class _Loop:
    """One run of a case."""

    def __init__(self, case: Case, watch: Watch) -> None:
        self.case, self.watch = case, watch
        self.traits = set(case.traits)
        self.task = TASKS[next((trait for trait in case.traits if trait in TASKS), "net")]
        self.losses: list[str] = []
        self.hook_calls = 0
        self.folder = Path.cwd()
        self.recorder = Recorder()
        torch.manual_seed(0)
        self.own = self.task.model()
        self.engine, self.model, self.optimizer, self.backward = self._made()
        self.scheduler = (
            torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
            if "scheduled" in self.traits
            else None
        )
        self.average = (
            torch.optim.swa_utils.AveragedModel(self.own)
            if "moving average" in self.traits
            else None
        )
        self.second = nn.Linear(1, 1)
        self.scaler = torch.amp.GradScaler("cpu", enabled="scaled gradients" in self.traits)

    def _made(self) -> tuple[Any, Any, Any, Callable[[Tensor], None]]:
        make = OPTIMIZERS[
            next((trait for trait in self.case.traits if trait in OPTIMIZERS), "AdamW")
        ]
        own = self.own
        if "compiled module: eager" in self.traits:
            own.body = torch.compile(own.body, backend="eager")
        if self.case.driver == "Accelerate":
            from accelerate import Accelerator

            engine = Accelerator(
                cpu=True, gradient_accumulation_steps=2 if "accumulated" in self.traits else 1
            )
            return engine, *engine.prepare(own, make(own.parameters())), engine.backward
        if self.case.driver == "Fabric":
            from lightning.fabric import Fabric

            precision = "bf16-mixed" if "autocast" in self.traits else "32-true"
            engine = Fabric(
                accelerator="cpu",
                devices=self.case.ranks,
                strategy="ddp" if self.case.ranks > 1 else "auto",
                precision=precision,
            )
            engine.launch()
            return engine, *engine.setup(own, make(own.parameters())), engine.backward
        model: nn.Module = own
        if self.case.ranks > 1:
            model = self._spread(own)
        for backend in ("eager", "aot_eager"):
            if f"compiled: {backend}" in self.traits:
                model = torch.compile(model, backend=backend)
        return None, model, make(model.parameters()), lambda loss: loss.backward()

    def _spread(self, own: nn.Module) -> nn.Module:
        distributed.init_process_group("gloo")
        if "FSDP2" in self.traits:
            for each in (own.body[0], own.head, own):
                fully_shard(each)
            return own
        if "tensor parallel" in self.traits:
            mesh = distributed.device_mesh.init_device_mesh("cpu", (self.case.ranks,))
            return parallelize_module(
                own, mesh, {"body.0": ColwiseParallel(), "head": RowwiseParallel()}
            )
        static, unused = "static graph" in self.traits, "unused parameters" in self.traits
        return DistributedDataParallel(own, static_graph=static, find_unused_parameters=unused)

    # The steps.

    def train(self) -> None:
        """All of them, watched or not."""
        times = 2 if "watched twice" in self.traits else 1
        for _ in range(times):
            with contextlib.ExitStack() as stack:
                for context in self._contexts():
                    stack.enter_context(context)
                monitors = [
                    each.__enter__() if "never left" in self.traits else stack.enter_context(each)
                    for each in self._monitors()
                ]
                if "on a thread" in self.traits:
                    thread = threading.Thread(target=self._steps, args=(monitors,))
                    thread.start()
                    thread.join()
                else:
                    self._steps(monitors)

    def _monitors(self) -> Iterator[Any]:
        if self.watch.by != "lflops":
            return
        several = "two monitors" in self.traits
        models = (
            {"one": self.model, "two": self.second} if "two models" in self.traits else self.model
        )
        for number in range(2 if several else 1):
            settings = {
                "dirpath": self.folder / f"lflops{number}",
                "log": lambda text: None,
            } | self.watch.settings
            if "measured peaks" in self.traits:
                settings["hardware"] = "measure"
            logger = self if "curves" in self.traits else None
            accumulation = 2 if "accumulated" in self.traits else 1
            yield lflops.monitor(
                models,
                self.optimizer,
                engine=self.engine,
                accumulation=accumulation,
                logger=logger,
                log_every=2,
                **settings,
            )

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """As a logger of the user's."""
        self.recorder.add(metrics, step)

    def _contexts(self) -> Iterator[Any]:
        traits = self.traits
        if "own dispatch mode" in traits:
            yield _Counting(self)
        if "saved tensors hooks" in traits:
            yield torch.autograd.graph.saved_tensors_hooks(self.called, self.called)
        if "anomaly mode" in traits:
            yield torch.autograd.detect_anomaly(check_nan=False)
        if "deterministic" in traits:
            torch.use_deterministic_algorithms(mode=True)
        yield _hooks(self)

    def called(self, value: Any) -> Any:
        """A hook that gives back what it is given."""
        self.hook_calls += 1
        return value

    def count(self, *_: Any) -> None:
        """A hook that gives nothing."""
        self.hook_calls += 1

    def _batches(self) -> Iterator[Any]:
        rank = int(os.environ.get("RANK", "0"))
        made = (self.task.batch(index * self.case.ranks + rank) for index in range(BATCHES))
        return made if "generator of batches" in self.traits else iter(list(made))

    def _steps(self, monitors: list[Any]) -> None:
        culprit = Culprit(self.watch.by) if self.watch.by not in {"nobody", "lflops"} else None
        batches = self._batches()
        for monitor in monitors:
            batches = monitor.data(batches)
        for index, batch in enumerate(batches):
            if culprit is not None:
                culprit.step(self.own)
            with contextlib.ExitStack() as stack:
                for monitor in monitors:
                    stack.enter_context(
                        monitor.step() if "no batch given" in self.traits else monitor.step(batch)
                    )
                self._step(index, batch)
            self._between(index, monitors)
            if "left early" in self.traits and index == 5:
                break

    def _step(self, index: int, batch: Any) -> None:
        if "LBFGS" in self.traits:
            self.optimizer.step(lambda: self._forward_and_backward(index, batch))
            return
        accumulated = "accumulated" in self.traits
        last = not accumulated or index % 2
        with self._accumulating(last=bool(last)):
            self._forward_and_backward(index, batch)
        if self.case.driver != "Accelerate" and not last:
            return
        if "clipped" in self.traits:
            self._clip()
        self.scaler.step(self.optimizer) if self.scaler.is_enabled() else self.optimizer.step()
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none="gradient kept in place" not in self.traits)
        if self.scheduler is not None:
            self.scheduler.step()
        if self.average is not None:
            self.average.update_parameters(self.own)

    @contextlib.contextmanager
    def _accumulating(self, *, last: bool) -> Iterator[None]:
        if self.case.driver == "Accelerate":
            with self.engine.accumulate(self.model):
                yield
        elif "no_sync" in self.traits and not last:
            with self.model.no_sync():
                yield
        else:
            yield

    def _clip(self) -> None:
        if self.case.driver == "Accelerate":
            self.engine.clip_grad_norm_(self.model.parameters(), 0.1)
        elif self.case.driver == "Fabric":
            self.engine.clip_gradients(self.model, self.optimizer, max_norm=0.1)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)

    def _forward_and_backward(self, index: int, batch: Any) -> Tensor:
        if "LBFGS" in self.traits:
            self.optimizer.zero_grad()
        mixed = "autocast" in self.traits and self.case.driver == "your own loop"
        with torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext():
            loss = self.task.loss(self.model, batch)
        if index == 6:
            self._come_to_grief()
        if "tensor hooks" in self.traits:
            loss.register_hook(self.called)
        self.backward(self.scaler.scale(loss))
        self.losses.append(digest(loss))
        if "gathered losses" in self.traits:
            total = loss.detach().clone()
            distributed.all_reduce(total)
            self.losses.append(digest(total))
        says(f"step {index} loss {loss.item()!r}")
        return loss

    def _come_to_grief(self) -> None:
        for trait, error in {
            "raises": ValueError,
            "KeyboardInterrupt": KeyboardInterrupt,
            "SystemExit": SystemExit,
        }.items():
            if trait in self.traits:
                raise error("planted")

    def _between(self, index: int, monitors: list[Any]) -> None:
        traits = self.traits
        if "validated" in traits and index % 4 == 3:
            with contextlib.ExitStack() as stack:
                for monitor in monitors:
                    stack.enter_context(monitor.stage("validate"))
                self._validate(monitors)
        if index == 5:
            if "copied on the way" in traits:
                self.losses.append(digest(copy.deepcopy(self.own).state_dict()))
            if "pickled on the way" in traits:
                self.losses.append(digest(pickle.loads(pickle.dumps(self.own)).state_dict()))  # noqa: S301 - our own
            if "saved on the way" in traits:
                torch.save(
                    {"model": self.own.state_dict(), "optimizer": self.optimizer.state_dict()},
                    self.folder / "saved.pt",
                )
            if "frozen on the way" in traits:
                self.own.body.requires_grad_(requires_grad=False)
            if "replaced on the way" in traits:
                self.own.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def _validate(self, monitors: list[Any]) -> None:
        context = (
            torch.inference_mode if "evaluated in inference mode" in self.traits else torch.no_grad
        )
        self.model.eval()
        with context():
            for index in range(100, 104):
                batch = self.task.batch(index)
                with contextlib.ExitStack() as stack:
                    for monitor in monitors:
                        stack.enter_context(monitor.step(batch))
                    self.losses.append(digest(self.task.loss(self.model, batch)))
        self.model.train()

    def facts(self) -> Facts:
        """What became of it."""
        objects = {} if self.engine is None else {"engine": self.engine}
        averaged = {} if self.average is None else {"average": digest(self.average.state_dict())}
        scheduled = (
            {} if self.scheduler is None else {"scheduler": digest(self.scheduler.state_dict())}
        )
        calls = {
            name: each.calls for name, each in self.own.named_modules() if isinstance(each, Net)
        }
        return {
            "losses": self.losses,
            "logged": self.recorder.entries,
            "calls of the model": calls,
            "calls of hooks": self.hook_calls,
            "looks into the batch": Loads.looks,
            **averaged,
            **scheduled,
            **of_modules(self.own),
            **of_optimizers([getattr(self.optimizer, "optimizer", self.optimizer)]),
            **attributes(**objects),
            **checkpoints(self.folder),
        }


class _Counting(TorchDispatchMode):
    """A dispatch mode of the user's."""

    def __init__(self, loop: _Loop) -> None:
        super().__init__()
        self.loop = loop

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.loop.hook_calls += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _hooks(loop: _Loop) -> Iterator[None]:
    """Those of the user's, as long as the loop runs. Each call is counted."""
    handles = [
        handle
        for trait, register in HOOKS.items()
        if trait in loop.traits
        for handle in register(loop)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _on_every_module(loop: _Loop) -> list[Any]:
    modules = nn.modules.module
    return [
        modules.register_module_forward_pre_hook(loop.count),
        modules.register_module_forward_hook(loop.count),
        modules.register_module_full_backward_pre_hook(loop.count),
        modules.register_module_full_backward_hook(loop.count),
    ]


def _that_replaces(loop: _Loop) -> list[Any]:
    def replace(module: nn.Module, inputs: Any, output: Any) -> Any:
        loop.hook_calls += 1
        return output * 1.5 if isinstance(module, nn.Linear) else None

    return [nn.modules.module.register_module_forward_hook(replace)]


def _on_modules(loop: _Loop) -> list[Any]:
    places = list(loop.own.modules())
    handles = [each.register_forward_pre_hook(loop.count) for each in places]
    return (
        handles
        + [each.register_forward_hook(loop.count) for each in places]
        + [each.register_full_backward_hook(loop.count) for each in places]
    )


def _with_kwargs(loop: _Loop) -> list[Any]:
    places = list(loop.own.modules())
    handles = [
        each.register_forward_hook(loop.count, with_kwargs=True, always_call=True)
        for each in places
    ]
    return handles + [
        each.register_forward_pre_hook(loop.count, with_kwargs=True) for each in places
    ]


def _that_raises(loop: _Loop) -> list[Any]:
    def fail(*_: Any) -> None:
        loop.hook_calls += 1
        if len(loop.losses) == 6:
            raise ValueError("a hook of the user's")

    return [loop.own.head.register_forward_hook(fail)]


def _on_tensors(loop: _Loop) -> list[Any]:
    parameters = list(loop.own.parameters())
    handles = [each.register_post_accumulate_grad_hook(loop.count) for each in parameters]
    return handles + [each.register_hook(loop.called) for each in parameters]


def _on_optimizers(loop: _Loop) -> list[Any]:
    inner = getattr(loop.optimizer, "optimizer", loop.optimizer)
    handles = [inner.register_step_pre_hook(loop.count), inner.register_step_post_hook(loop.count)]
    return [*handles, register_optimizer_step_post_hook(loop.count)]


HOOKS: dict[str, Callable[[_Loop], list[Any]]] = {
    "global module hooks": _on_every_module,
    "global hook that replaces": _that_replaces,
    "module hooks": _on_modules,
    "hook with kwargs": _with_kwargs,
    "hook that raises": _that_raises,
    "tensor hooks": _on_tensors,
    "optimizer hooks": _on_optimizers,
}
"""What registers them, and gives their handles."""


def run(case: Case, watch: Watch) -> Facts:
    """Run a case."""
    loop = _Loop(case, watch)
    facts: Facts = {}
    with around(facts):
        loop.train()
    if case.ranks > 1 and distributed.is_initialized():
        distributed.destroy_process_group()
    return facts | loop.facts()
