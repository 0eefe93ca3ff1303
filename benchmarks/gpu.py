"""Run everything that requires a GPU, in ten minutes.

`make gpu` runs this script. Each part is a process with a time limit, and writes a line of
RESULTS.md.

Without a CUDA device, every part reports that it did not run. `--device cpu` runs the code of the
parts on the CPU, and `--device simulated` on the simulated accelerator of the tests, which shows
nothing about a real chip. Both options write no results.
"""

import argparse
import contextlib
import functools
import gzip
import importlib.util
import json
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_faults import told
from gpu_models import Convolutions, Decoder
from results import record
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import lflops
from lflops import LflopsError, Profile, Schedule, units
from lflops.estimation.prediction import predict
from lflops.inputs.devices import profiler_activity
from lflops.trace.analysis.read_trace import read_trace
from lflops.trace.analysis.sentences import verdict
from lflops.trace.analysis.summary import TraceSummary, summarise
from lflops.trace.ncu.command import command, read

TOTAL = 600
"""Time limit for all parts together, in seconds."""

ROOT = Path(__file__).parents[1]
STEPS = 24
LAYERS = 4
TB_PROFILER = """
import json, sys, tempfile
from torch_tb_profiler.profiler.data import RunProfileData
data = RunProfileData.parse("host_0", 1, sys.argv[1], tempfile.mkdtemp())
print(len(data.op_list_groupby_name), len(data.kernel_list_groupby_name_op))
"""


class Layers(nn.Module):
    """Transformer layers that are trained to reproduce their input. They are wide on a GPU."""

    def __init__(self, device: str) -> None:
        """Build the layers on the CPU."""
        super().__init__()
        self.wide = device == "cuda"
        self.width = 1024 if self.wide else 32
        heads = 8 if self.wide else 2
        blocks = (
            nn.TransformerEncoderLayer(self.width, heads, 4 * self.width, 0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers."""
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, x: Tensor) -> Tensor:
        """Return the distance between the output and the input."""
        return F.mse_loss(self(x), x)

    def batch(self, samples: int = 8) -> Tensor:
        """Return a batch, the same each time."""
        return torch.randn(
            samples, 512 if self.wide else 8, self.width, generator=torch.Generator().manual_seed(1)
        )


def fit(
    device: str, folder: str, *callbacks: Any, steps: int = STEPS, told: bool = True
) -> tuple[Layers, float]:
    """Train with the callbacks, and return the layers and the seconds.

    With `told=False`, the Trainer does not know the number of steps, so lflops does not fit a
    window into the run.
    """
    # A machine with a GPU may not have Lightning. Then only the parts that need it fail.
    from lightning.pytorch import (
        Callback,
        LightningModule,
        Trainer,
        seed_everything,
    )

    class Ends(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.global_step >= steps

    class Training(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Layers(device)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return self.model.loss(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    seed_everything(0, verbose=False)
    module = Training()
    batches = DataLoader(TensorDataset(module.model.batch(8).repeat(steps, 1, 1)), batch_size=8)
    trainer = Trainer(
        max_steps=steps if told else 10**9,
        **_place(device),
        devices=1,
        callbacks=[*callbacks, Ends()],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    synchronise(device)
    start = time.perf_counter()
    trainer.fit(module, batches)
    synchronise(device)
    return module.model, time.perf_counter() - start


def _place(device: str) -> dict[str, Any]:
    """Return the Trainer's arguments for a device."""
    if device == "simulated":
        from tests.support.simulated import FIRST
        from tests.support.simulated.lightning import on

        return {"accelerator": "auto", "strategy": on(FIRST)}
    return {"accelerator": "gpu" if device == "cuda" else "cpu"}


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.accelerator.synchronize()


def monitored(device: str, folder: str) -> Profile:
    """Return the profile of a window in a training run."""
    monitor = lflops.FlopsMonitor(
        Schedule(wait=8, warmup=3, active=3),
        dirpath=folder,
        html=False,
        trace=True,
        on_error="raise",
    )
    fit(device, folder, monitor)
    (found,) = monitor.profiles
    return found


def seconds_of(device: str, run: Callable[[], Any], times: int = 10) -> float:
    """Return the median time of a function. The device is synchronized before and after."""
    taken = []
    for _ in range(times + 2):
        synchronise(device)
        start = time.perf_counter()
        run()
        synchronise(device)
        taken.append(time.perf_counter() - start)
    return median(taken[2:])


def tests(_: str) -> Iterator[str]:
    """Run the tests that need a GPU.

    Only their files are collected, because other files import packages that a borrowed machine may
    not have.
    """
    files = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if "@pytest.mark.gpu" in path.read_text()
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        *map(str, files),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)  # noqa: S603 - our own tests
    print(done.stdout, done.stderr)
    lines = [
        line
        for line in done.stdout.splitlines()
        if re.search(r"\d+ (passed|failed|skipped|error)", line)
    ]
    yield lines[-1].strip("= ") if lines else f"pytest ended with {done.returncode}"


def phases(device: str) -> Iterator[str]:
    """Compare phases and module times of the monitor with synchronized measurements."""
    with tempfile.TemporaryDirectory() as folder:
        found = monitored(device, folder)
    module = Layers(device).to(device)
    x, optimizer = module.batch().to(device), torch.optim.AdamW(module.parameters(), lr=1e-4)

    def forward() -> Tensor:
        return module.loss(x)

    def both() -> None:
        forward().backward()

    truth = {"forward": seconds_of(device, forward)}
    truth["backward"] = seconds_of(device, both) - truth["forward"]
    truth["optimizer"] = seconds_of(device, optimizer.step)
    clean = [step for step in found.steps if step.is_unprofiled]
    for name, seconds in truth.items():
        told = median(step.phases.get(name, 0.0) for step in clean)
        yield f"{name}: monitored {units.duration(told)}, synchronised {units.duration(seconds)}"
    times = [found.modules[f"model.layers.{index}"].forward.seconds for index in range(LAYERS)]
    alone = [seconds_of(device, lambda layer=layer: layer(x)) for layer in module.layers]  # type: ignore[misc]
    off = [
        each.median / one - 1 for each, one in zip(times, alone, strict=True) if each is not None
    ]
    yield f"forward of {len(off)} layers: {', '.join(f'{share:+.1%}' for share in off)} from each alone, synchronised"


def loss_outside(device: str) -> Iterator[str]:
    """Compare phases with synchronized measurements in a custom loop.

    The loss is outside the model, and takes a large part of the step.
    """
    wide = device == "cuda"
    rows, width, words = (8192, 1024, 32768) if wide else (64, 32, 512)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, words)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x, wanted = torch.randn(rows, width, device=device), torch.arange(rows, device=device) % words

    def forward() -> Tensor:
        return F.cross_entropy(model(x), wanted)

    with (
        tempfile.TemporaryDirectory() as folder,
        lflops.monitor(model, optimizer, dirpath=folder, html=False, on_error="raise") as monitor,
    ):
        for _ in range(40):
            with monitor.step(x):
                forward().backward()
                optimizer.step()
                optimizer.zero_grad()
    clean = [step for step in monitor.profiles[-1].steps if step.is_unprofiled]
    truth = {"forward": seconds_of(device, forward)}
    truth["backward"] = seconds_of(device, lambda: forward().backward()) - truth["forward"]
    for name, seconds in truth.items():
        told = median(step.phases.get(name, 0.0) for step in clean)
        yield f"{name}: monitored {units.duration(told)}, synchronised {units.duration(seconds)}"


def overhead(device: str) -> Iterator[str]:
    """Compare fits with and without the monitor, alternately.

    The window of the monitor never opens.
    """
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            _, plain = fit(device, folder, steps=3 * STEPS, told=False)
            watching = lflops.FlopsMonitor(
                Schedule(wait=10**6, warmup=1, active=1), dirpath=folder, html=False
            )
            ratios.append(fit(device, folder, watching, steps=3 * STEPS, told=False)[1] / plain)
    yield f"a fit with the step clock alone takes {median(ratios):.3f} of one without"


def calibrate(device: str) -> Iterator[str]:
    """Measure the peaks twice, and compare them with the table of chips."""
    first, second = (lflops.calibrate(device, fresh=True) for _ in range(2))
    known = lflops.hardware.lookup(torch.cuda.get_device_name()) if device == "cuda" else None
    for dtype, peak in first.peak_flops_per_second.items():
        table = known.peak_flops_per_second.get(dtype) if known is not None else None
        again = second.peak_flops_per_second.get(dtype)
        share = "" if table is None else f", {units.percent(peak / table)} of the table's"
        yield f"{dtype}: {units.quantity(peak, 'FLOP/s')} and {units.quantity(again, 'FLOP/s')}{share}"
    bandwidth = known.bandwidth_bytes_per_second if known is not None else None
    told = first.bandwidth_bytes_per_second
    share = (
        ""
        if bandwidth is None or told is None
        else f", {units.percent(told / bandwidth)} of the table's"
    )
    yield f"bandwidth: {units.quantity(told, 'B/s')} and {units.quantity(second.bandwidth_bytes_per_second, 'B/s')}{share}"


def memory(device: str) -> Iterator[str]:
    """Compare an estimate with torch's allocator for the same two steps."""
    hardware = torch.cuda.get_device_name() if device == "cuda" else None
    x = Layers(device).batch()
    found = lflops.estimate(
        lambda: Layers(device), (x,), backward=True, optimizer=torch.optim.AdamW, hardware=hardware
    ).memory
    if found is None:
        raise RuntimeError("the estimate has no memory")
    reserved = units.size(found.reserved.reserved_bytes) if found.reserved else units.UNKNOWN
    if device == "cpu":
        yield f"estimated {units.size(found.peak_bytes)}, reserved {reserved}; allocated: needs a device"
        return
    allocator: Any = torch.cuda if device == "cuda" else torch.accelerator
    allocator.reset_peak_memory_stats()
    module = Layers(device).to(device)
    optimizer, batch = torch.optim.AdamW(module.parameters()), x.to(device)
    for _ in range(2):
        optimizer.zero_grad()
        module(batch).sum().backward()
        optimizer.step()
    synchronise(device)
    yield f"alive: estimated {units.size(found.peak_bytes)}, allocated {units.size(allocator.max_memory_allocated())}"
    yield f"reserved: estimated {reserved}, reserved {units.size(allocator.max_memory_reserved())}"


ATTENTION: dict[str, tuple[tuple[int, ...], torch.dtype, dict[str, Any]]] = {
    "bf16, causal": ((2, 8, 256, 64), torch.bfloat16, {"is_causal": True}),
    "fp32": ((2, 8, 256, 64), torch.float32, {}),
    "fp16, width 256": ((2, 8, 256, 256), torch.float16, {}),
    "bf16, odd width": ((2, 8, 256, 61), torch.bfloat16, {}),
    "fp32, dropout": ((2, 8, 256, 64), torch.float32, {"dropout_p": 0.1}),
}


class Attention(nn.Module):
    """A module with one attention call."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Keep the options of the call."""
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention of the tensor with itself."""
        return F.scaled_dot_product_attention(x, x, x, **self.options)


def attention(device: str) -> Iterator[str]:
    """Compare the attention kernel that an estimate predicts with the kernel that torch uses."""
    if device == "simulated":
        yield "the simulated device has no fused kernel"
        return
    hardware = torch.cuda.get_device_name() if device == "cuda" else None
    for title, (shape, dtype, options) in ATTENTION.items():
        x = torch.randn(shape, dtype=dtype)
        predicted = lflops.estimate(Attention(options), (x,), hardware=hardware).by_operator()
        with profile(activities=[ProfilerActivity.CPU]) as recorder:
            Attention(options)(x.to(device))
        taken = {event.key.removeprefix("aten::") for event in recorder.key_averages()}
        names = [name.removeprefix("aten::") for name in predicted]
        kernel = next((name for name in names if "attention" in name), "math")
        fused = sorted(
            name for name in taken if name.startswith("_scaled_dot_product") and "math" not in name
        )
        right = kernel in taken or (kernel == "math" and not fused)
        yield f"{title}: predicted {kernel}, {'taken' if right else 'NOT taken: ' + ', '.join(fused)}"


def trace(device: str) -> Iterator[str]:
    """Read the trace of a window with lflops and with torch-tb-profiler."""
    with tempfile.TemporaryDirectory() as folder:
        found = monitored(device, folder)
        (path,) = (
            each
            for each in Path(folder).rglob("*.pt.trace.json.gz")
            if not each.parent.name.startswith("compat-")
        )
        summary = summarise(read_trace(path))
        yield " ".join(verdict(summary))
        told = found.trace
        if (
            summary.device is not None
            and told is not None
            and told.device_compute_seconds is not None
        ):
            yield (
                f"computing: the file says {units.duration(summary.device.computing / 1e9)}, the profile "
                f"{units.duration(told.device_compute_seconds)}; idle {units.duration(summary.device.idle / 1e9)} and "
                f"{units.duration(told.device_idle_seconds)}"
            )
        if importlib.util.find_spec("torch_tb_profiler") is None:
            yield "torch-tb-profiler is not installed"
            return
        command = [sys.executable, "-W", "ignore", "-c", TB_PROFILER, str(path)]
        read = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()  # noqa: S603 - our own program
        ours = f"ours {len(summary.operators)} and {len(summary.kernels)}"
        yield f"torch-tb-profiler reads {read[-2]} operators and {read[-1]} kernels; {ours}"


def recorded(device: str, run: Callable[[], Any]) -> TraceSummary:
    """Trace five steps with torch.profiler, with shapes, and read the trace with lflops."""
    activities = [ProfilerActivity.CPU, profiler_activity(torch.device(device))]
    with profile(
        activities=[each for each in activities if each is not None], record_shapes=True
    ) as recorder:
        for _ in range(5):
            run()
        synchronise(device)
    with tempfile.TemporaryDirectory() as folder:
        recorder.export_chrome_trace(f"{folder}/a.json")
        return summarise(read_trace(Path(folder) / "a.json"))


def graphs(device: str) -> Iterator[str]:
    """Trace the same forward in eager mode, compiled, and as a CUDA graph."""
    module = Layers(device).to(device).eval()
    x = module.batch().to(device)
    options: dict[str, dict[str, Any]] = {
        "eager": {},
        "compiled": {},
        "CUDA graphs": {"mode": "reduce-overhead"},
    }
    for title, how in options.items():
        if device != "cuda" and title == "CUDA graphs":
            yield "CUDA graphs: need CUDA"
            continue
        if device == "simulated" and title == "compiled":
            yield "compiled: inductor makes no code for the simulated device"
            continue
        run = module if title == "eager" else torch.compile(module, **how)
        with torch.no_grad():
            for _ in range(3):
                run(x)
            summary = recorded(device, lambda run=run: run(x))  # type: ignore[misc]
        macs = units.count(summary.utilization.macs) if summary.utilization else units.UNKNOWN
        launches = summary.launches.calls if summary.launches else 0
        kernels = sum(row.calls for row in summary.kernels)
        yield f"{title}: {kernels} kernels by {launches} launches, {macs} MACs by shapes, {len(summary.unsupported)} operators not counted"


def bits(device: str) -> Iterator[str]:
    """Check that a fit with the monitor ends with the same weights as a fit without it.

    Two fits without the monitor are compared as well. Attention uses matmuls, because fused kernels
    are not deterministic.
    """
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    with tempfile.TemporaryDirectory() as folder, sdpa_kernel(SDPBackend.MATH):
        (first, _), (second, _) = (fit(device, folder) for _ in range(2))
        watching = lflops.FlopsMonitor(
            Schedule(wait=4, warmup=2, active=2), dirpath=folder, html=False, on_error="raise"
        )
        watched, _ = fit(device, folder, watching)
    for name, other in (("without the monitor again", second), ("with it", watched)):
        pairs = zip(first.state_dict().values(), other.state_dict().values(), strict=True)
        differ = sum(not torch.equal(one, another) for one, another in pairs)
        yield f"{name}: " + (
            "the same weights to the bit" if not differ else f"{differ} tensors DIFFER"
        )


def out_of_memory(device: str) -> Iterator[str]:
    """Let a layer use all memory, and return the report that lflops writes."""
    from lightning.pytorch import Callback

    if device != "cuda":
        yield "needs CUDA's allocator"
        return

    class Keeps(Callback):
        def __init__(self, folder: str) -> None:
            self.folder = folder

        def on_exception(self, *_: Any) -> None:
            with gzip.open(f"{self.folder}/snapshot.pickle.gz", "wb", 6) as file:
                # torch has no public function for this.
                pickle.dump(torch.cuda.memory._snapshot(), file)  # noqa: SLF001

        def on_fit_start(self, _: Any, module: Any) -> None:
            kept: list[Tensor] = []
            module.model.layers[2].register_forward_hook(
                lambda *_: kept.append(torch.empty(256 << 20, dtype=torch.uint8, device=device))
            )

    torch.cuda.set_per_process_memory_fraction(0.05)
    with folder_for("out-of-memory") as folder:
        monitor = lflops.FlopsMonitor(
            Schedule(wait=1, warmup=1, active=1),
            dirpath=folder,
            html=False,
            on_oom=True,
            on_error="raise",
        )
        with contextlib.suppress(torch.OutOfMemoryError):
            fit(device, folder, Keeps(folder), monitor)
        for path in sorted(Path(folder).glob("oom-*.txt")):
            yield " / ".join(path.read_text().splitlines()[:12])


def verdicts(device: str) -> Iterator[str]:
    """Return the verdicts on training runs with one fault or none."""
    yield from told(device, lambda: Layers(device), folder_for)


def on_convolutions(device: str) -> Iterator[str]:
    """Return the verdicts on a model for which no rule was tuned."""
    yield from told(
        device, lambda: Convolutions(device), lambda name: folder_for(f"convolutions {name}")
    )


def on_a_decoder(device: str) -> Iterator[str]:
    """Return the verdicts on another model for which no rule was tuned."""
    yield from told(device, lambda: Decoder(device), lambda name: folder_for(f"decoder {name}"))


@contextlib.contextmanager
def folder_for(name: str) -> Iterator[str]:
    """Provide a temporary folder.

    If the environment variable KEEP is set, the folder is inside KEEP and stays.
    """
    if "KEEP" in os.environ:
        folder = Path(os.environ["KEEP"], name.replace(" ", "-"))
        folder.mkdir(parents=True, exist_ok=True)
        yield str(folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield temporary


def step_time(device: str) -> Iterator[str]:
    """Compare the steps of two models of transformers with their predicted times."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if device != "cuda":
        yield "predicted for chips of the table"
        return
    size = {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "vocab_size": 32000,
    }
    models = {
        "Llama of 0.9 G, 4 x 2048 tokens": (
            lambda: LlamaForCausalLM(LlamaConfig(use_cache=False, **size)),
            32000,
            (4, 2048),
        ),
        "GPT-2 medium, 16 x 1024 tokens": (
            lambda: GPT2LMHeadModel(
                GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False)
            ),
            50257,
            (16, 1024),
        ),
    }
    for title, (build, words, shape) in models.items():
        ids = torch.randint(words, shape)
        batch = {"input_ids": ids, "labels": ids}
        model = build().to(device, torch.bfloat16).train()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        here = {name: each.to(device) for name, each in batch.items()}

        def step(model: Any = model, here: Any = here, optimizer: Any = optimizer) -> None:
            model(**here).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        torch.cuda.reset_peak_memory_stats()
        seconds, peak = seconds_of(device, step), torch.cuda.max_memory_allocated()
        del model, optimizer, here, step
        found = lflops.estimate(
            lambda build=build: build().to(torch.bfloat16).train(),
            kwargs=batch,
            backward=True,
            loss=lambda out: out.loss,
            optimizer=functools.partial(torch.optim.AdamW, fused=True),
            hardware=torch.cuda.get_device_name(),
        )
        predicted = predict(found)
        interval = (
            ""
            if predicted is None
            else f" ({units.duration(predicted.low)} to {units.duration(predicted.high)})"
        )
        yield f"{title}: {units.duration(seconds)}, predicted {units.duration(predicted and predicted.seconds)}{interval}"
        held = found.memory.peak_bytes if found.memory else None
        yield f"peak {units.size(peak)}, estimated {units.size(held)}"


PRODUCT_FLOPS = 2 * 4096 * 1024 * 2048
PRODUCT = """
import torch
torch.backends.cuda.matmul.allow_tf32 = {tf32}
a = torch.ones(4096, 1024, device="cuda", dtype=torch.{dtype})
b = torch.ones(1024, 2048, device="cuda", dtype=torch.{dtype})
torch.cuda.synchronize()
(a @ b).sum().item()
"""


def counters(device: str) -> Iterator[str]:
    """Compare the operations that Nsight Compute counts in a matmul with 2 per MAC.

    The matmul has 4096 x 1024 x 2048 MACs.
    """
    if device != "cuda" or shutil.which("ncu") is None:
        yield "needs Nsight Compute"
        return
    for dtype, tf32 in (
        ("float32", False),
        ("float32", True),
        ("bfloat16", False),
        ("float16", False),
        ("float64", False),
    ):
        with folder_for(f"ncu-{dtype}-{tf32}") as folder:
            Path(folder, "train.py").write_text(PRODUCT.format(dtype=dtype, tf32=tf32))
            words = command(["train.py"])
            words[words.index("python3")] = sys.executable
            done = subprocess.run(words, check=False, capture_output=True, text=True, cwd=folder)  # noqa: S603 - a command of lflops
            try:
                found = read(Path(folder, "lflops.ncu.csv").read_text())
            except (OSError, LflopsError) as error:
                yield f"{dtype}: {error}: {done.stdout[-300:]} {done.stderr[-300:]}"
                continue
            product = next(
                each for each in found.kernels if "gemm" in each.name or "nvjet" in each.name
            )
            by = {
                name: "–" if flops is None else f"{flops / PRODUCT_FLOPS:.6f}"
                for name, flops in product.flops_by_dtype.items()
            }
            yield f"{dtype}{' by tf32' if tf32 else ''}: {product.name[:40]}, of the product's operations {by}"


PARTS: dict[str, tuple[Callable[[str], Iterator[str]], int]] = {
    "tests": (tests, 150),
    "phases and attribution": (phases, 60),
    "a loss outside of the model": (loss_outside, 60),
    "overhead": (overhead, 60),
    "calibrate": (calibrate, 90),
    "memory": (memory, 60),
    "attention": (attention, 60),
    "trace": (trace, 60),
    "compiled and graphs": (graphs, 120),
    "to the bit": (bits, 60),
    "out of memory": (out_of_memory, 60),
    "verdicts": (verdicts, 120),
    "verdicts on convolutions": (on_convolutions, 120),
    "verdicts on a decoder": (on_a_decoder, 120),
    "step time": (step_time, 90),
    "counters": (counters, 90),
}
"""The parts in their order, each with its time limit in seconds."""


def outcome(name: str, device: str, seconds: float) -> str:
    """Run a part in a separate process, and return its lines, or why there are none."""
    command = [sys.executable, "-W", "ignore", __file__, "--device", device, "--part", name]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=seconds)  # noqa: S603 - this file
    except subprocess.TimeoutExpired:
        return f"**stopped after {seconds:.0f} s**"
    if done.returncode:
        return f"**failed**: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}"
    lines: list[str] = json.loads(done.stdout.splitlines()[-1])
    return "; ".join(lines)


def main() -> None:
    """Run the parts, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu", "simulated"], default="cuda")
    parser.add_argument(
        "--part",
        choices=list(PARTS),
        help="run one part in this process, and print its lines as JSON",
    )
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if options.device != "cuda":
        torch.set_num_threads(1)
    if options.part and options.device == "simulated":
        from tests.support import simulated

        simulated.load()
        simulated.plan(macs_per_second=1e9, bytes_per_second=1e9)
        simulated.follow_real_clock(follows=True)
    if options.part:
        with contextlib.redirect_stdout(sys.stderr):
            lines = list(PARTS[options.part][0](options.device))
        print(json.dumps(lines))
        return
    rows, begin = [], time.monotonic()
    for name, (_, limit) in PARTS.items():
        left = TOTAL - (time.monotonic() - begin)
        start = time.monotonic()
        if options.device == "cuda" and not torch.cuda.is_available():
            result = "not run on CUDA"
        else:
            result = (
                outcome(name, options.device, min(limit, left)) if left > 1 else "**no time left**"
            )
        rows.append(f"| {name} | {time.monotonic() - start:.0f} s | {result} |")
        print(rows[-1], flush=True)
    on = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device here"
    if options.device == "simulated":
        on = "A device of the tests in host memory, of 1 GFLOP/s and 1 GB/s as planted, no claim about a real chip"
    if options.device != "cpu":
        title = (
            "On a GPU"
            if options.device == "cuda"
            else "The same parts on the simulated accelerator"
        )
        script = "gpu.py" if options.device == "cuda" else "gpu.py --device simulated"
        record(script, title, [f"{on}.", "", "| part | took | result |", "|---|--:|---|", *rows])


if __name__ == "__main__":
    main()
