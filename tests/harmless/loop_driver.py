"""Run cases with `lflops.monitor` in a custom loop: alone, with Accelerate, or with Fabric."""

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
"""The names of all traits of this driver."""


class _Loop:
    """One run of a case."""

    def __init__(self, case: Case, watch: Watch) -> None:
        self.case = case
        self.watch = watch
        self.traits = set(case.traits)
        task = next((trait for trait in case.traits if trait in TASKS), "net")
        self.task = TASKS[task]
        self.losses: list[str] = []
        self.hook_calls = 0
        self.folder = Path.cwd()
        self.recorder = Recorder()
        torch.manual_seed(0)
        self.own = self.task.model()
        self.engine, self.model, self.optimizer, self.backward = self._made()
        self.scheduler: torch.optim.lr_scheduler.StepLR | None = None
        if "scheduled" in self.traits:
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.average: torch.optim.swa_utils.AveragedModel | None = None
        if "moving average" in self.traits:
            self.average = torch.optim.swa_utils.AveragedModel(self.own)
        self.second = nn.Linear(1, 1)
        self.scaler = torch.amp.GradScaler("cpu", enabled="scaled gradients" in self.traits)

    def _made(self) -> tuple[Any, Any, Any, Callable[[Tensor], None]]:
        """Return the engine, the prepared model and optimizer, and the function for backward."""
        name = next((trait for trait in self.case.traits if trait in OPTIMIZERS), "AdamW")
        make = OPTIMIZERS[name]
        own = self.own
        if "compiled module: eager" in self.traits:
            own.body = torch.compile(own.body, backend="eager")
        if self.case.driver == "Accelerate":
            from accelerate import Accelerator

            accumulation = 2 if "accumulated" in self.traits else 1
            engine = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
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
        """Distribute the model over the ranks."""
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
        return DistributedDataParallel(
            own,
            static_graph="static graph" in self.traits,
            find_unused_parameters="unused parameters" in self.traits,
        )

    # The steps.

    def train(self) -> None:
        """Train for all steps, with or without a monitor."""
        times = 2 if "watched twice" in self.traits else 1
        for _ in range(times):
            with contextlib.ExitStack() as stack:
                for context in self._contexts():
                    stack.enter_context(context)
                monitors = []
                for each in self._monitors():
                    if "never left" in self.traits:
                        monitors.append(each.__enter__())
                    else:
                        monitors.append(stack.enter_context(each))
                if "on a thread" in self.traits:
                    thread = threading.Thread(target=self._steps, args=(monitors,))
                    thread.start()
                    thread.join()
                else:
                    self._steps(monitors)

    def _monitors(self) -> Iterator[Any]:
        if self.watch.by != "lflops":
            return
        count = 2 if "two monitors" in self.traits else 1
        models: Any = self.model
        if "two models" in self.traits:
            models = {"one": self.model, "two": self.second}
        for number in range(count):
            settings: dict[str, Any] = {
                "dirpath": self.folder / f"lflops{number}",
                "log": lambda text: None,
            }
            settings |= self.watch.settings
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
        """Record metrics, as a logger of the user."""
        self.recorder.add(metrics, step)

    def _contexts(self) -> Iterator[Any]:
        """Yield the contexts of the user in which the steps run."""
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
        """Count a call of a hook that returns its argument."""
        self.hook_calls += 1
        return value

    def count(self, *_: Any) -> None:
        """Count a call of a hook that returns nothing."""
        self.hook_calls += 1

    def _batches(self) -> Iterator[Any]:
        rank = int(os.environ.get("RANK", "0"))
        made = (self.task.batch(index * self.case.ranks + rank) for index in range(BATCHES))
        if "generator of batches" in self.traits:
            return made
        return iter(list(made))

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
                    given = () if "no batch given" in self.traits else (batch,)
                    stack.enter_context(monitor.step(*given))
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
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
        else:
            self.optimizer.step()
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
            self._fail()
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

    def _fail(self) -> None:
        """Raise the error that a trait asks for, if any."""
        if "raises" in self.traits:
            raise ValueError("planted")
        if "KeyboardInterrupt" in self.traits:
            raise KeyboardInterrupt("planted")
        if "SystemExit" in self.traits:
            raise SystemExit("planted")

    def _between(self, index: int, monitors: list[Any]) -> None:
        """Do what the user does between two steps."""
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
                copied = pickle.loads(pickle.dumps(self.own))  # noqa: S301 - our own data
                self.losses.append(digest(copied.state_dict()))
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
        context: Any = torch.no_grad
        if "evaluated in inference mode" in self.traits:
            context = torch.inference_mode
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
        """Return the results of the run."""
        calls = {
            name: each.calls for name, each in self.own.named_modules() if isinstance(each, Net)
        }
        facts: Facts = {
            "losses": self.losses,
            "logged": self.recorder.entries,
            "calls of the model": calls,
            "calls of hooks": self.hook_calls,
            "looks into the batch": Loads.looks,
        }
        if self.average is not None:
            facts["average"] = digest(self.average.state_dict())
        if self.scheduler is not None:
            facts["scheduler"] = digest(self.scheduler.state_dict())
        facts |= of_modules(self.own)
        facts |= of_optimizers([getattr(self.optimizer, "optimizer", self.optimizer)])
        if self.engine is not None:
            facts |= attributes(engine=self.engine)
        return facts | checkpoints(self.folder)


class _Counting(TorchDispatchMode):
    """A dispatch mode of the user, which counts operators."""

    def __init__(self, loop: _Loop) -> None:
        super().__init__()
        self.loop = loop

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.loop.hook_calls += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _hooks(loop: _Loop) -> Iterator[None]:
    """Install the user's hooks, which count their calls, while the loop runs."""
    handles = []
    for trait, register in HOOKS.items():
        if trait in loop.traits:
            handles += register(loop)
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
    handles: list[Any] = []
    for module in loop.own.modules():
        handles.append(module.register_forward_pre_hook(loop.count))
        handles.append(module.register_forward_hook(loop.count))
        handles.append(module.register_full_backward_hook(loop.count))
    return handles


def _with_kwargs(loop: _Loop) -> list[Any]:
    handles: list[Any] = []
    for module in loop.own.modules():
        handles.append(module.register_forward_hook(loop.count, with_kwargs=True, always_call=True))
        handles.append(module.register_forward_pre_hook(loop.count, with_kwargs=True))
    return handles


def _that_raises(loop: _Loop) -> list[Any]:
    def fail(*_: Any) -> None:
        loop.hook_calls += 1
        if len(loop.losses) == 6:
            raise ValueError("a hook of the user's")

    return [loop.own.head.register_forward_hook(fail)]


def _on_tensors(loop: _Loop) -> list[Any]:
    handles: list[Any] = []
    for parameter in loop.own.parameters():
        handles.append(parameter.register_post_accumulate_grad_hook(loop.count))
        handles.append(parameter.register_hook(loop.called))
    return handles


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
"""For each trait: a function that registers the user's hooks and returns their handles."""


def run(case: Case, watch: Watch) -> Facts:
    """Run a case, and return its facts."""
    loop = _Loop(case, watch)
    facts: Facts = {}
    with around(facts):
        loop.train()
    if case.ranks > 1 and distributed.is_initialized():
        distributed.destroy_process_group()
    return facts | loop.facts()
