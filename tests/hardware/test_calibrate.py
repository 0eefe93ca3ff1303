"""Test `lflops.calibrate` on fake machines and clocks, and on this CPU."""

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import lflops
from lflops.cli.main import main
from lflops.errors import HardwareError
from lflops.hardware import calibrate as page
from lflops.hardware.calibrate import (
    TorchMachine,
    _locked,
    available_memory,
    calibrate,
    forget,
    last_level_cache,
    measure,
)
from lflops.hardware.chips import Hardware, lookup

MIB = 1 << 20


class FakeClock:
    """A clock that is moved by the work that runs.

    All durations are powers of two, so that no digit is lost. `slow` returns how many times longer
    a block appears.
    """

    def __init__(self, slow: Callable[[int], float] = lambda block: 1.0) -> None:
        self.now = 0.0
        self.blocks: list[float] = []
        self._slow = slow

    def mark(self) -> float:
        return self.now

    def settle(self) -> None:
        pass

    def seconds(self, start: float, end: float) -> float:
        seconds = (end - start) * self._slow(len(self.blocks))
        self.blocks.append(seconds)
        return seconds


class FakeMachine:
    """A device with a given rate of matmuls by dtype and size.

    Its copies run at 2**33 bytes/s.
    """

    name = "fake"
    copies = 2.0**33

    def __init__(
        self,
        clock: FakeClock,
        rate: Callable[[str, int], float],
        *,
        cache: int = MIB,
        free: int = 1 << 40,
    ) -> None:
        self.cache_bytes = cache
        self._free = free
        self.clock = clock
        self.rate = rate
        self.products: list[tuple[str, int]] = []
        self.copied: list[int] = []
        self.runs: list[str] = []
        self.precisions: list[str] = []

    def free_bytes(self) -> int:
        return self._free

    @contextlib.contextmanager
    def precision(self, dtype: str) -> Iterator[None]:
        self.precisions.append(dtype)
        yield
        self.precisions.pop()

    def product(self, dtype: str, size: int) -> Callable[[], object]:
        self.products.append((dtype, size))
        return partial(self._run, dtype, 2 * size**3 / self.rate(dtype, size))

    def copy(self, size: int) -> Callable[[], object]:
        self.copied.append(size)
        return partial(self._run, "copy", 2 * size / self.copies)

    def _run(self, name: str, seconds: float) -> None:
        assert name in ["copy", *self.precisions]
        if self.runs[-1:] != [name]:
            self.runs.append(name)
        self.clock.now += seconds


def growing(top: int) -> Callable[[str, int], float]:
    """Return a rate of 2**40 FLOP/s at size 256, which doubles with each size up to `top`."""
    return lambda dtype, size: 2.0**40 * min(size, top) / 256


def test_the_peak_is_the_fastest_products_rate() -> None:
    """The peak is the rate of the fastest matmul.

    It is 2**40 FLOP/s at size 256 and 2**42 at 1024. Size 8192 takes 1/4 s and is not faster, and
    there is no time for a larger one.
    """
    clock = FakeClock()
    machine = FakeMachine(clock, growing(1024))
    assert ({"fp32": 2.0**42}, 2.0**33) == measure(machine, clock, ["fp32"])
    assert [("fp32", size) for size in (256, 512, 1024, 2048, 4096, 8192)] == machine.products


def test_a_size_that_was_slow_by_chance_does_not_end_the_search() -> None:
    """A size that is slow once does not end the search.

    Size 1024 takes 1/32 s instead of 1/128 s. Size 2048 is the fastest and is still found; 4096 is
    slower.
    """
    clock = FakeClock()
    slow = {1024: 4, 4096: 2}
    machine = FakeMachine(
        clock, lambda dtype, size: 2.0**36 * min(size, 2048) / 256 / slow.get(size, 1)
    )
    assert {"bf16": 2.0**39} == measure(machine, clock, ["bf16"])[0]
    assert ("bf16", 4096) == machine.products[-1]


@pytest.mark.parametrize("seconds", [1 / 4, 5 / 32])
def test_no_product_is_tried_that_would_take_too_long(seconds: float) -> None:
    """The next size is not tried if its three blocks would need more than the remaining time.

    There are 4 s, and each of these blocks is eight times as long. With blocks of 1/4 s they would
    need 6 s. With blocks of 5/32 s they would need 15/4 s, but five blocks of 5/32 s were already
    used.
    """
    clock = FakeClock()
    machine = FakeMachine(clock, lambda dtype, size: 2.0**25 / seconds)
    assert {"fp64": pytest.approx(2.0**25 / seconds)} == measure(machine, clock, ["fp64"])[0]
    assert [("fp64", 256)] == machine.products


def test_products_take_a_32nd_of_the_free_memory_at_most() -> None:
    """A matmul uses at most a 32nd of the free memory.

    Three matrices of 512 x 512 doubles fit exactly. With one byte less, only those of 256 x 256
    fit.
    """
    needed = 32 * 3 * 512 * 512 * 8
    for free, largest in ((needed, 512), (needed - 1, 256)):
        clock = FakeClock()
        machine = FakeMachine(clock, growing(4096), free=free)
        measure(machine, clock, ["fp64"])
        assert largest == max(size for _, size in machine.products)


@pytest.mark.parametrize(
    ("free", "half"),
    [
        # Source and destination together are 8 times the cache of 1 MiB.
        (1 << 40, 4 * MIB),
        # They are a quarter of the free memory.
        (24 * MIB, 3 * MIB),
        # 4 times the cache is still enough.
        (16 * MIB, 2 * MIB),
        (16 * MIB - 8, None),
    ],
)
def test_a_copy_is_several_times_the_cache_or_not_made(free: int, half: int | None) -> None:
    """If a copy cannot be several times the cache, the bandwidth is unknown.

    A smaller copy would measure the cache instead of the memory.
    """
    clock = FakeClock()
    machine = FakeMachine(clock, growing(256), free=free)
    peaks, bandwidth = measure(machine, clock, ["bf16"])
    assert {"bf16": 2.0**40} == peaks
    if half is None:
        assert bandwidth is None
        assert [] == machine.copied
    else:
        assert 2.0**33 == bandwidth
        assert [half] == machine.copied


@pytest.mark.parametrize(
    ("slow", "peak"), [((0, 3, 5, 6, 9), 2.0**40), ((0, 1, 3, 5, 6, 9), 2.0**39)]
)
def test_the_median_of_the_rounds_is_taken(slow: tuple[int, ...], peak: float) -> None:
    """The result is the median of eleven rounds: five slow rounds do not change it, but six do."""
    # There is only memory for one size. Five blocks probe it before the rounds begin.
    free = 32 * 3 * 256 * 256 * 2
    clock = FakeClock(lambda block: 2.0 if block - 5 in slow else 1.0)
    machine = FakeMachine(clock, growing(256), cache=1 << 60, free=free)
    assert ({"fp16": peak}, None) == measure(machine, clock, ["fp16"])
    assert 5 + 11 == len(clock.blocks)


def test_all_take_turns_in_blocks_of_some_tenths_of_a_second() -> None:
    """Dtypes and copy alternate in eleven rounds of blocks of 0.2 s, and at most one call more."""
    clock = FakeClock()
    machine = FakeMachine(clock, growing(256))
    measure(machine, clock, ["fp32", "bf16"])
    assert ["fp32", "bf16", "copy"] * 11 == machine.runs[-33:]
    assert all(0.2 <= seconds < 0.2 + 2**-9 for seconds in clock.blocks[-33:])


def test_a_slow_machine_is_given_three_rounds() -> None:
    """If a matmul takes 4 s, there are only three rounds.

    More rounds would exceed the available time.
    """
    clock = FakeClock()
    machine = FakeMachine(clock, lambda dtype, size: 2.0**23, cache=1 << 60)
    assert ({"fp64": 2.0**23}, None) == measure(machine, clock, ["fp64"])
    assert [4.0] * (3 + 3) == clock.blocks


def test_a_dtype_without_products_is_left_out() -> None:
    """A dtype for which torch raises an error is left out; without any dtype there is an error."""
    clock = FakeClock()

    def rate(dtype: str, size: int) -> float:
        if dtype == "fp16":
            raise RuntimeError("not implemented for 'Half'")
        return growing(256)(dtype, size)

    assert {"fp32": 2.0**40} == measure(FakeMachine(clock, rate), clock, ["fp16", "fp32"])[0]
    with pytest.raises(
        HardwareError, match=r"fake has only \d+ bytes of free memory, too few for a matmul in fp16"
    ):
        measure(FakeMachine(clock, rate), clock, ["fp16"])


class Second:
    """A clock on which every block takes a second.

    So there is only time for the smallest matmul.
    """

    def mark(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def seconds(self, start: None, end: None) -> float:
        return 1.0


class Forbidden:
    """A clock that must not be read."""

    def mark(self) -> None:
        raise AssertionError


class Watch:
    """A stand-in for `CpuWatch`: each measurement loses the next share of the CPU in the list.

    The last share is used again.
    """

    def __init__(self, shares: list[float]) -> None:
        self._share = shares.pop(0) if len(shares) > 1 else shares[0]
        self.used = 1 - self._share

    def lost(self) -> float:
        return self._share


@pytest.fixture(autouse=True)
def small_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend that the last-level cache has 1 MiB; return the path of a new calibration file."""
    monkeypatch.setattr(page, "last_level_cache", lambda root: MIB)
    monkeypatch.setattr(page, "CpuWatch", partial(Watch, [0.0]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lflops" / "calibration.json"


def on_the_cpu(**options: Any) -> Hardware:
    """Calibrate this CPU with a clock on which every block takes a second."""
    return calibrate("cpu", **{"clock": Second(), **options})


def test_the_cpu_is_measured_with_real_products() -> None:
    """A matmul has 2 * 256**3 FLOPs and a copy moves 8 MiB, in a second each."""
    hardware = on_the_cpu(dtypes=["fp64", "fp32", "bf16"])
    assert dict.fromkeys(["fp64", "fp32", "bf16"], 2.0 * 256**3) == hardware.peak_flops_per_second
    assert 8.0 * MIB == hardware.bandwidth_bytes_per_second
    assert re.fullmatch(
        r"measured by lflops.calibrate, \d{4}-\d\d-\d\d, torch \S+, (1 thread|\d+ threads)",
        hardware.source,
    )
    assert lookup(hardware.name) is None


def test_all_dtypes_that_run_are_measured_unless_some_are_named() -> None:
    """By default every dtype is measured that runs on the CPU, where TF32 does not exist."""
    assert (
        {"fp64", "fp32", "bf16"}
        <= set(on_the_cpu().peak_flops_per_second)
        <= {"fp64", "fp32", "fp16", "bf16"}
    )


def test_what_was_measured_is_remembered(small_machine: Path) -> None:
    """A measurement is stored by device, torch version, number of threads and dtypes.

    `fresh=True` measures again.
    """
    first = on_the_cpu(dtypes=["fp32"])
    assert first == on_the_cpu(dtypes=["fp32"], clock=Forbidden())
    for other in ({"dtypes": ["fp64"]}, {"dtypes": ["fp32"], "fresh": True}):
        with pytest.raises(AssertionError):
            on_the_cpu(**other, clock=Forbidden())
    (key,) = json.loads(small_machine.read_text())
    assert first.name in key
    assert f"torch {torch.__version__}" in key
    assert f"{torch.get_num_threads()} threads" in key
    assert "fp32" in key


def test_a_busy_machine_is_measured_twice_and_marked_if_it_stays_busy(
    small_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If other processes use half of the CPU, it is measured a second time.

    If the CPU is free then, the result counts. If not, the result is marked, and the next run
    measures again.
    """
    monkeypatch.setattr(page, "CpuWatch", partial(Watch, [0.5, 0.0]))
    once = on_the_cpu(dtypes=["fp32"])
    assert once == on_the_cpu(dtypes=["fp32"], clock=Forbidden())
    assert not once.source.endswith("CPU")
    monkeypatch.setattr(page, "CpuWatch", partial(Watch, [0.5]))
    busy = on_the_cpu(dtypes=["fp32"], fresh=True)
    assert busy.source.endswith(", while other processes used the CPU")
    # It is stored nevertheless, for the other ranks of this run.
    assert busy.source in small_machine.read_text()
    with pytest.raises(AssertionError):
        on_the_cpu(dtypes=["fp32"], clock=Forbidden())


def test_a_peak_that_a_step_exceeded_is_forgotten(small_machine: Path) -> None:
    """`forget` removes one measurement and returns whether it was stored.

    Other measurements stay. Numbers that a user passed are not stored.
    """
    first = on_the_cpu(dtypes=["fp32"])
    other = on_the_cpu(dtypes=["fp64"])
    assert forget(first) is True
    assert forget(first) is False
    assert forget(Hardware("by hand", {"fp32": 1.0})) is False
    assert other == on_the_cpu(dtypes=["fp64"], clock=Forbidden())
    with pytest.raises(AssertionError):
        on_the_cpu(dtypes=["fp32"], clock=Forbidden())


def test_another_number_of_threads_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another number of threads or another version of torch needs a new measurement."""
    on_the_cpu(dtypes=["fp32"])
    for owner, name, value in (
        (torch, "get_num_threads", lambda: 77),
        (torch, "__version__", "9.9"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            with pytest.raises(AssertionError):
                on_the_cpu(dtypes=["fp32"], clock=Forbidden())


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda text: b"",
    "cut short": lambda text: text[:-20],
    "a list": lambda text: b"[]",
    "deep": lambda text: b"[" * 100_000,
    "no text": lambda text: b"\xff" + text,
    "a peak below 0": lambda text: text.replace(b"33554432.0", b"-1.0"),
    "a peak in words": lambda text: text.replace(b"33554432.0", b'"fast"'),
    "no peaks": lambda text: text.replace(b'"peak_flops_per_second"', b'"peaks"'),
    "another dtype": lambda text: text.replace(b'"fp32"', b'"float32"'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_file_is_ignored_and_written_anew(small_machine: Path, damage: str) -> None:
    """A damaged file is ignored, and replaced after a new measurement."""
    first = on_the_cpu(dtypes=["fp32"])
    small_machine.write_bytes(DAMAGES[damage](small_machine.read_bytes()))
    with pytest.raises(AssertionError):
        on_the_cpu(dtypes=["fp32"], clock=Forbidden())
    assert first == on_the_cpu(dtypes=["fp32"]) == on_the_cpu(dtypes=["fp32"], clock=Forbidden())


def test_the_other_entries_of_the_file_stay(small_machine: Path) -> None:
    """Other entries of the file are kept, also those of a later lflops."""
    small_machine.parent.mkdir()
    small_machine.write_text('{"another": {"from": "later"}}')
    on_the_cpu(dtypes=["fp32"])
    assert {"from": "later"} == json.loads(small_machine.read_text())["another"]
    assert ["calibration.json"] == [path.name for path in small_machine.parent.glob("*.json")]


def test_without_a_place_to_remember_it_is_measured_each_time(small_machine: Path) -> None:
    """If the file cannot be written, each call measures, and no temporary file is left.

    There is a folder in place of the file, and then a file in place of its folder.
    """
    small_machine.mkdir(parents=True)
    assert on_the_cpu(dtypes=["fp32"]) == on_the_cpu(dtypes=["fp32"])
    assert [small_machine] == list(small_machine.parent.glob("*.json*"))
    shutil.rmtree(small_machine.parent)
    small_machine.parent.write_text("")
    assert on_the_cpu(dtypes=["fp32"]) == on_the_cpu(dtypes=["fp32"])
    assert "" == small_machine.parent.read_text()


ANOTHER_RANK = """
import sys
from pathlib import Path
from lflops.hardware import calibrate as page

page.last_level_cache = lambda root: 1 << 20
print(page.calibrate("cpu", dtypes=["fp32"], clock=None).source)
"""


def waits_for_a_lock(pid: int) -> bool:
    """Return whether a process has opened the lock file, which this process has locked."""
    with contextlib.suppress(FileNotFoundError):
        opened = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
        return any(each.endswith(".lock") for each in opened)
    return False


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no list of open files")
def test_the_ranks_of_a_machine_measure_one_after_another_and_all_but_the_first_read(
    small_machine: Path,
) -> None:
    """While one rank measures, the next one waits; then it reads exactly the same numbers."""

    class Waiting(Second):
        """A clock that starts a second process, and continues when that process waits or ends."""

        other: subprocess.Popen[str] | None = None

        def mark(self) -> None:
            if self.other is not None:
                return
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": str(torch.get_num_threads()),
            }
            command = [sys.executable, "-c", ANOTHER_RANK]
            self.other = subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env=environment
            )
            while self.other.poll() is None and not waits_for_a_lock(self.other.pid):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.other.wait(0.05)
            assert self.other.returncode is None, "the second process did not wait"

    clock = Waiting()
    first = on_the_cpu(dtypes=["fp32"], clock=clock)
    assert clock.other is not None
    assert (f"{first.source}\n", None) == clock.other.communicate(timeout=600)
    (entry,) = json.loads(small_machine.read_text()).values()
    # The number is that of the first process: on its clock a block takes a second.
    assert 2.0 * 256**3 == entry["peak_flops_per_second"]["fp32"]


def test_without_a_place_for_a_lock_it_is_measured_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the folder of the lock cannot be created, the measurement runs without a lock.

    Here a file is in place of the folder.
    """
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert {"fp32": 2.0 * 256**3} == on_the_cpu(dtypes=["fp32"]).peak_flops_per_second


@pytest.mark.skipif(os.name != "posix", reason="nothing is locked here")
def test_a_lock_that_is_never_released_is_waited_for_two_minutes(tmp_path: Path) -> None:
    """After two minutes without the lock, the measurement runs anyway.

    Each wait takes ten seconds on the test's clock.
    """
    slept: list[float] = []
    path = tmp_path / "lock"
    with _locked(path) as first, _locked(path, lambda: 10.0 * len(slept), slept.append) as second:
        assert first is True
        assert second is False
    assert 12 == len(slept)
    with _locked(path) as free:
        assert free


@pytest.mark.skipif(os.name != "posix", reason="nothing is locked here")
def test_a_lock_through_a_planted_link_creates_no_file(tmp_path: Path) -> None:
    """A symbolic link in place of the lock is an error, because its name can be guessed."""
    path = tmp_path / "lock"
    path.symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"), _locked(path):
        pass
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("home", ["", "relative"])
def test_without_a_cache_home_it_is_in_the_home(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If `XDG_CACHE_HOME` is empty or relative, the file is in `~/.cache`, as XDG requires."""
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.setenv("HOME", str(tmp_path))
    on_the_cpu(dtypes=["fp32"])
    assert (tmp_path / ".cache" / "lflops" / "calibration.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "meta"}, "device='meta': pass 'cpu'"),
        ({"device": "gpu"}, "device='gpu': pass 'cpu'"),
        ({"device": "cuda:99"}, "device='cuda:99': "),
        (
            {"device": "cpu", "dtypes": ["fp32", "fp8"]},
            "dtypes contains 'fp8', which cannot be measured on cpu: use one or more of fp64, fp32, fp16",
        ),
        (
            {"device": "cpu", "dtypes": "tf32"},
            "dtypes contains 'tf32', which cannot be measured on cpu",
        ),
        ({"device": "cpu", "dtypes": []}, "dtypes=[]: pass one or more of"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: dict[str, Any], message: str) -> None:
    """The error contains the argument, its value and the accepted values."""
    with pytest.raises(HardwareError, match=re.escape(message)):
        calibrate(**arguments, clock=Forbidden())


def state() -> dict[str, object]:
    """Return the settings of torch that a measurement could change."""
    backends = {
        "cuda": torch.backends.cuda.matmul,
        "mkldnn": getattr(torch.backends.mkldnn, "matmul", None),
    }
    precision = {}
    for name, backend in backends.items():
        default = torch.get_float32_matmul_precision()
        precision[name] = getattr(backend, "fp32_precision", default)
    return {
        "threads": torch.get_num_threads(),
        "precision": precision,
        "random numbers": (torch.get_rng_state().tolist(), random.getstate()),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.fixture
def torch_as_it_was() -> Iterator[None]:
    """Restore torch's settings after a test that changes them."""
    threads = torch.get_num_threads()
    numbers = torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(numbers)
    torch.set_float32_matmul_precision("highest")
    for backend in (
        torch.backends,
        torch.backends.cuda.matmul,
        getattr(torch.backends.mkldnn, "matmul", None),
    ):
        if hasattr(backend, "fp32_precision"):
            backend.fp32_precision = "none"
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    # torch 2.8 cannot return the default device if it is `None`.
    vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)
    torch.use_deterministic_algorithms(False)


CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_torch_is_left_as_it_was(context: str, precision: str, torch_as_it_was: None) -> None:
    """A measurement leaves torch's settings unchanged in every context, also if it fails."""
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(torch.float64)
    with CONTEXTS[context]():
        before = state()
        assert {"fp32", "bf16"} == set(on_the_cpu(dtypes=["fp32", "bf16"]).peak_flops_per_second)
        assert before == state()
        with pytest.raises(AssertionError):
            on_the_cpu(dtypes=["fp32"], fresh=True, clock=Forbidden())
        assert before == state()


CULPRITS: dict[str, Callable[[], object]] = {
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "random numbers": lambda: torch.rand(1),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "device": lambda: torch.set_default_device("meta"),
    "deterministic": lambda: torch.use_deterministic_algorithms(mode=True),
}


@pytest.mark.parametrize("part", CULPRITS)
def test_a_measurement_that_changed_torch_would_be_seen(
    part: str, monkeypatch: pytest.MonkeyPatch, torch_as_it_was: None
) -> None:
    """A measurement that changes one part of the state changes exactly this part of `state()`.

    So the test above would fail. The change happens where a matmul is prepared.
    """
    product = TorchMachine.product

    def planted(self: TorchMachine, dtype: str, size: int) -> Callable[[], object]:
        run = product(self, dtype, size)
        CULPRITS[part]()
        return run

    monkeypatch.setattr(TorchMachine, "product", planted)
    before = state()
    on_the_cpu(dtypes=["bf16"])
    after = state()
    assert [part] == [name for name in before if before[name] != after[name]]


def test_nobody_who_watches_sees_it() -> None:
    """An active `FlopCounterMode` counts nothing of a measurement."""
    with FlopCounterMode(display=False) as counter:
        on_the_cpu(dtypes=["fp32"])
    assert 0 == counter.get_total_flops()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_fp32_is_measured_in_full_precision_whatever_the_user_chose(
    precision: str, autocast: bool, torch_as_it_was: None
) -> None:
    """The result of an fp32 matmul is close to that in doubles, with every setting of precision.

    The significands of bf16 and TF32 have only 8 and 11 bits, so their results would differ more.
    """
    machine = TorchMachine(torch.device("cpu"))
    torch.set_float32_matmul_precision(precision)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        machine.alone(),
        machine.precision("fp32"),
    ):
        run = machine.product("fp32", 64)
        product = run()
    assert isinstance(run, partial)
    left, right = run.args
    assert isinstance(product, torch.Tensor)
    assert (product - left.double() @ right.double()).abs().max() < 2**-16


@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"),
    reason="torch 2.9 is the first with a precision for all backends",
)
def test_a_precision_for_all_backends_still_is_one_afterwards(torch_as_it_was: None) -> None:
    """After a measurement, the user's precision for all backends still reaches matmuls.

    lflops leaves no setting of a single backend that would override it.
    """
    torch.backends.fp32_precision = "ieee"
    on_the_cpu(dtypes=["fp32"])
    torch.backends.fp32_precision = "tf32"
    assert "tf32" == torch.backends.mkldnn.matmul.fp32_precision


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_the_operands_are_random_numbers_that_are_always_the_same(dtype: str) -> None:
    """The operands have the measured dtype, and the same random numbers in each call."""
    first = TorchMachine(torch.device("cpu")).product(dtype, 32)()
    second = TorchMachine(torch.device("cpu")).product(dtype, 32)()
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    assert torch.equal(first, second)
    assert first.std() > 1
    dtypes = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
    assert dtypes[dtype] == first.dtype


def test_a_copy_copies() -> None:
    """The copy has the requested number of bytes and the content of its source."""
    copied = TorchMachine(torch.device("cpu")).copy(4096)()
    assert isinstance(copied, torch.Tensor)
    assert 4096 == copied.nbytes
    assert 1.0 == copied.mean().item()


def tree(root: Path, files: dict[str, str]) -> Path:
    """Write files below a folder that represents the root of a file system."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def cache(cpu: int, index: int, level: int, size: str, sharers: str) -> dict[str, str]:
    """Return the files by which the kernel describes one cache of a CPU."""
    folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
    return {
        f"{folder}/level": f"{level}\n",
        f"{folder}/size": f"{size}\n",
        f"{folder}/shared_cpu_list": f"{sharers}\n",
    }


def test_the_last_level_cache_is_all_of_the_last_level(tmp_path: Path) -> None:
    """The last-level cache is the sum over groups of CPUs: two groups with 32 MiB each.

    The L2 caches of the CPUs are not the last level.
    """
    files = {f"sys/devices/system/cpu/cpu{cpu}/cpufreq": "" for cpu in range(4)}
    for cpu in range(4):
        group = "0-1" if cpu < 2 else "2-3"
        files |= cache(cpu, index=2, level=2, size="1024K", sharers=str(cpu))
        files |= cache(cpu, index=3, level=3, size="32768K", sharers=group)
    assert 64 * MIB == last_level_cache(tree(tmp_path, files))


def test_an_unknown_cache_is_taken_to_be_large(tmp_path: Path) -> None:
    """Without complete information from the kernel, a cache of 64 MiB is assumed."""
    assert 64 * MIB == last_level_cache(tmp_path)
    assert 64 * MIB == last_level_cache(
        tree(tmp_path, {"sys/devices/system/cpu/cpu0/cache/index0/level": "3"})
    )


MEMINFO = "MemTotal:       16000000 kB\nMemFree:          100000 kB\nMemAvailable:    8000000 kB\n"
STAT = "inactive_file 512\ntotal_inactive_file 1024\n"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8000000 * 1024),
        ({"proc/self/cgroup": "0::/\n"}, 8000000 * 1024),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/step/memory.max": "max\n",
                "sys/fs/cgroup/job/step/memory.current": "9000\n",
                "sys/fs/cgroup/job/step/memory.stat": STAT,
                "sys/fs/cgroup/job/memory.max": "100000\n",
                "sys/fs/cgroup/job/memory.current": "40000\n",
                "sys/fs/cgroup/job/memory.stat": "inactive_file 512\n",
            },
            100000 - 40000 + 512,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:memory:/host/path\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "50000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "20000\n",
                "sys/fs/cgroup/memory/memory.stat": STAT,
            },
            50000 - 20000 + 1024,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "1000",
                "sys/fs/cgroup/memory.current": "5000",
                "sys/fs/cgroup/memory.stat": "",
            },
            0,
        ),
    ],
)
def test_free_memory_is_what_system_and_control_groups_leave(
    tmp_path: Path, files: dict[str, str], free: int
) -> None:
    """The tightest limit of the system and the control groups counts.

    Memory of cached files counts as free.
    """
    assert free == available_memory(tree(tmp_path, {"proc/meminfo": MEMINFO} | files))


def test_unknown_memory_is_taken_to_be_little(tmp_path: Path) -> None:
    """Without Linux's files, one GiB of free memory is assumed."""
    assert 1 << 30 == available_memory(tmp_path)


MEASURED = Hardware(
    "NVIDIA H200",
    {"fp32": 50e12, "bf16": 989.5e12 * 3 / 4},
    4.08e12,
    150e9,
    "measured by lflops.calibrate",
)


@pytest.mark.parametrize(("arguments", "chip"), [([], "H200 SXM"), (["H200"], "H200 SXM")])
def test_the_shell_measures_beside_the_table(
    arguments: list[str],
    chip: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The measurement is shown next to the peaks of this machine's chip, also if the chip is named.

    The measured bf16 is three quarters of the peak.
    """
    monkeypatch.setattr(page, "calibrate", lambda fresh: MEASURED)
    assert 0 == main(["hardware", *arguments, "--measure"])
    out = capsys.readouterr().out
    assert re.search(rf"{chip} +measured +reached", out)
    assert re.search(r"bf16 +989\.50 TFLOP/s +742\.13 TFLOP/s +75\.0 %", out)
    assert re.search(r"fp8 +1\.98 PFLOP/s +– +–", out)
    assert 0 == main(["hardware", *arguments, "--measure", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert [chip] == [each["name"] for each in shown["chips"]]
    assert "NVIDIA H200" == shown["measured"]["name"]


def test_the_shell_measures_a_machine_that_is_not_in_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a chip in the table, there is no column with a share of a peak."""
    monkeypatch.setattr(
        page,
        "calibrate",
        lambda fresh: Hardware("some CPU", {"fp32": 1e12}, None, None, "measured"),
    )
    assert 0 == main(["hardware", "--measure"])
    out = capsys.readouterr().out
    assert re.search(r"fp32 +1\.00 TFLOP/s", out)
    assert "some CPU, measured" in out
    assert "reached" not in out


def test_it_is_one_of_the_package() -> None:
    """`lflops.calibrate` is the function, although a file has the same name."""
    assert lflops.calibrate is calibrate
