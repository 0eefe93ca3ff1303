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
    """Moved by what runs, a power of two at a time, so that no digit is lost.

    A block can be made to last longer.
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
    """A device whose products run at the rates given by dtype and size, and whose copies run at 2**33 bytes/s."""

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
        self.cache_bytes, self._free = cache, free
        self.clock, self.rate = clock, rate
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
    """2**40 FLOP/s at a size of 256, twice as many at each size up to `top`, and from there on no more."""
    return lambda dtype, size: 2.0**40 * min(size, top) / 256


def test_the_peak_is_the_fastest_products_rate() -> None:
    """2**40 FLOP/s at 256, 2**42 at 1024.

    8192 takes 1/4 s and brings no more, and for a larger one there is no time.
    """
    clock = FakeClock()
    machine = FakeMachine(clock, growing(1024))
    assert ({"fp32": 2.0**42}, 2.0**33) == measure(machine, clock, ["fp32"])
    assert [("fp32", size) for size in (256, 512, 1024, 2048, 4096, 8192)] == machine.products


def test_a_size_that_was_slow_by_chance_does_not_end_the_search() -> None:
    """1024 takes 1/32 s and not 1/128.

    Twice as fast as that should have been, 2048 is found nonetheless, and 4096 is slower.
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
    """Three of eight times the size.

    6 s more, and there are 4; or 15/4 s, after five times 5/32 s were used up.
    """
    clock = FakeClock()
    machine = FakeMachine(clock, lambda dtype, size: 2.0**25 / seconds)
    assert {"fp64": pytest.approx(2.0**25 / seconds)} == measure(machine, clock, ["fp64"])[0]
    assert [("fp64", 256)] == machine.products


def test_products_take_a_32nd_of_the_free_memory_at_most() -> None:
    """Three matrices of 512 x 512 doubles.

    One byte less, and there is only room for those of 256 x 256.
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
        (1 << 40, 4 * MIB),  # source and destination are 8 times the cache of 1 MiB
        (24 * MIB, 3 * MIB),  # a quarter of what is free
        (16 * MIB, 2 * MIB),  # 4 times the cache are still some
        (16 * MIB - 8, None),
    ],
)
def test_a_copy_is_several_times_the_cache_or_not_made(free: int, half: int | None) -> None:
    """What the caches hold is not the memory's bandwidth: it is unknown then."""
    clock = FakeClock()
    machine = FakeMachine(clock, growing(256), free=free)
    assert ({"bf16": 2.0**40}, None if half is None else 2.0**33) == measure(
        machine, clock, ["bf16"]
    )
    assert ([] if half is None else [half]) == machine.copied


@pytest.mark.parametrize(
    ("slow", "peak"), [((0, 3, 5, 6, 9), 2.0**40), ((0, 1, 3, 5, 6, 9), 2.0**39)]
)
def test_the_median_of_the_rounds_is_taken(slow: tuple[int, ...], peak: float) -> None:
    """Of eleven rounds five may be of half the speed.

    With six, half the speed is what the machine has.
    """
    free = 32 * 3 * 256 * 256 * 2  # for one size, which is probed in 5 blocks
    clock = FakeClock(lambda block: 2.0 if block - 5 in slow else 1.0)
    machine = FakeMachine(clock, growing(256), cache=1 << 60, free=free)
    assert ({"fp16": peak}, None) == measure(machine, clock, ["fp16"])
    assert 5 + 11 == len(clock.blocks)


def test_all_take_turns_in_blocks_of_some_tenths_of_a_second() -> None:
    """Eleven rounds, of 0.2 s for each and at most one call more."""
    clock = FakeClock()
    machine = FakeMachine(clock, growing(256))
    measure(machine, clock, ["fp32", "bf16"])
    assert ["fp32", "bf16", "copy"] * 11 == machine.runs[-33:]
    assert all(0.2 <= seconds < 0.2 + 2**-9 for seconds in clock.blocks[-33:])


def test_a_slow_machine_is_given_three_rounds() -> None:
    """A product that takes 4 s.

    More than three of them would take longer than the time that there is.
    """
    clock = FakeClock()
    machine = FakeMachine(clock, lambda dtype, size: 2.0**23, cache=1 << 60)
    assert ({"fp64": 2.0**23}, None) == measure(machine, clock, ["fp64"])
    assert [4.0] * (3 + 3) == clock.blocks


def test_a_dtype_without_products_is_left_out() -> None:
    """Asked for one, torch says so; with none at all there is nothing to measure."""
    clock = FakeClock()

    def rate(dtype: str, size: int) -> float:
        if dtype == "fp16":
            raise RuntimeError("not implemented for 'Half'")
        return growing(256)(dtype, size)

    assert {"fp32": 2.0**40} == measure(FakeMachine(clock, rate), clock, ["fp16", "fp32"])[0]
    with pytest.raises(
        HardwareError, match=r"fake: no matmul in fp16 fits into the \d+ free bytes"
    ):
        measure(FakeMachine(clock, rate), clock, ["fp16"])


class Second:
    """A clock by which every block takes a second, so that the smallest product is the only one that there is time for."""

    def mark(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def seconds(self, start: None, end: None) -> float:
        return 1.0


class Forbidden:
    """A clock that must not be looked at."""

    def mark(self) -> None:
        raise AssertionError


class Watch:
    """What other processes take of the CPU in one measurement after the other, as a share.

    Then again nothing.
    """

    def __init__(self, shares: list[float]) -> None:
        self._share = shares.pop(0) if len(shares) > 1 else shares[0]
        self.used = 1 - self._share

    def lost(self) -> float:
        return self._share


@pytest.fixture(autouse=True)
def small_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This CPU with a last-level cache of 1 MiB, and a file of measurements of its own."""
    monkeypatch.setattr(page, "last_level_cache", lambda root: MIB)
    monkeypatch.setattr(page, "CpuWatch", partial(Watch, [0.0]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lflops" / "calibration.json"


def on_the_cpu(**options: Any) -> Hardware:
    """A measurement in which every block takes a second."""
    return calibrate("cpu", **{"clock": Second(), **options})


def test_the_cpu_is_measured_with_real_products() -> None:
    """2 * 256**3 FLOPs and 8 MiB in a second each."""
    hardware = on_the_cpu(dtypes=["fp64", "fp32", "bf16"])
    assert dict.fromkeys(["fp64", "fp32", "bf16"], 2.0 * 256**3) == hardware.peak_flops_per_second
    assert 8.0 * MIB == hardware.bandwidth_bytes_per_second
    assert re.fullmatch(
        r"measured by lflops.calibrate, \d{4}-\d\d-\d\d, torch \S+, (1 thread|\d+ threads)",
        hardware.source,
    )
    assert lookup(hardware.name) is None


def test_all_dtypes_that_run_are_measured_unless_some_are_named() -> None:
    """TF32 is something of CUDA's."""
    assert (
        {"fp64", "fp32", "bf16"}
        <= set(on_the_cpu().peak_flops_per_second)
        <= {"fp64", "fp32", "fp16", "bf16"}
    )


def test_what_was_measured_is_remembered(small_machine: Path) -> None:
    """By device, torch, number of threads and dtypes; `fresh` measures again."""
    first = on_the_cpu(dtypes=["fp32"])
    assert first == on_the_cpu(dtypes=["fp32"], clock=Forbidden())
    for other in ({"dtypes": ["fp64"]}, {"dtypes": ["fp32"], "fresh": True}):
        with pytest.raises(AssertionError):
            on_the_cpu(**other, clock=Forbidden())
    (key,) = json.loads(small_machine.read_text())
    assert all(
        part in key
        for part in (
            first.name,
            f"torch {torch.__version__}",
            f"{torch.get_num_threads()} threads",
            "fp32",
        )
    )


def test_a_busy_machine_is_measured_twice_and_marked_if_it_stays_busy(
    small_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the CPU was somebody else's.

    If that is over the second time, its figures count; if not, the next run measures again.
    """
    monkeypatch.setattr(page, "CpuWatch", partial(Watch, [0.5, 0.0]))
    once = on_the_cpu(dtypes=["fp32"])
    assert once == on_the_cpu(dtypes=["fp32"], clock=Forbidden())
    assert not once.source.endswith("CPU")
    monkeypatch.setattr(page, "CpuWatch", partial(Watch, [0.5]))
    busy = on_the_cpu(dtypes=["fp32"], fresh=True)
    assert busy.source.endswith(", while other processes used the CPU")
    assert busy.source in small_machine.read_text()  # for the other ranks of this run
    with pytest.raises(AssertionError):
        on_the_cpu(dtypes=["fp32"], clock=Forbidden())


def test_a_peak_that_a_step_exceeded_is_forgotten(small_machine: Path) -> None:
    """Others stay. What was given by hand was never remembered."""
    first, other = on_the_cpu(dtypes=["fp32"]), on_the_cpu(dtypes=["fp64"])
    assert [True, False, False] == [
        forget(each) for each in (first, first, Hardware("by hand", {"fp32": 1.0}))
    ]
    assert other == on_the_cpu(dtypes=["fp64"], clock=Forbidden())
    with pytest.raises(AssertionError):
        on_the_cpu(dtypes=["fp32"], clock=Forbidden())


def test_another_number_of_threads_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is another torch."""
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
    """Whatever is in it."""
    first = on_the_cpu(dtypes=["fp32"])
    small_machine.write_bytes(DAMAGES[damage](small_machine.read_bytes()))
    with pytest.raises(AssertionError):
        on_the_cpu(dtypes=["fp32"], clock=Forbidden())
    assert first == on_the_cpu(dtypes=["fp32"]) == on_the_cpu(dtypes=["fp32"], clock=Forbidden())


def test_the_other_entries_of_the_file_stay(small_machine: Path) -> None:
    """Also those that a later lflops wrote."""
    small_machine.parent.mkdir()
    small_machine.write_text('{"another": {"from": "later"}}')
    on_the_cpu(dtypes=["fp32"])
    assert {"from": "later"} == json.loads(small_machine.read_text())["another"]
    assert ["calibration.json"] == [path.name for path in small_machine.parent.glob("*.json")]


def test_without_a_place_to_remember_it_is_measured_each_time(small_machine: Path) -> None:
    """A folder where the file would be, and a file where its folder would be.

    Nothing lies about afterwards.
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
    """Whether a process has the file open that the first one has locked."""
    with contextlib.suppress(FileNotFoundError):
        opened = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
        return any(each.endswith(".lock") for each in opened)
    return False


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no list of open files")
def test_the_ranks_of_a_machine_measure_one_after_another_and_all_but_the_first_read(
    small_machine: Path,
) -> None:
    """While one measures, the next one waits; then it has the first one's figures, to the digit."""

    class Waiting(Second):
        """A clock in the first process, that starts the other one and goes on when that waits, or has ended."""

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
            assert self.other.returncode is None, "it did not wait"

    clock = Waiting()
    first = on_the_cpu(dtypes=["fp32"], clock=clock)
    assert clock.other is not None
    assert (f"{first.source}\n", None) == clock.other.communicate(timeout=600)
    (entry,) = json.loads(small_machine.read_text()).values()
    assert 2.0 * 256**3 == entry["peak_flops_per_second"]["fp32"], (
        "the first one's figure, by whose clock a block takes a second"
    )


def test_without_a_place_for_a_lock_it_is_measured_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is where the folder would be."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert {"fp32": 2.0 * 256**3} == on_the_cpu(dtypes=["fp32"]).peak_flops_per_second


@pytest.mark.skipif(os.name != "posix", reason="nothing is locked here")
def test_a_lock_that_is_never_released_is_waited_for_two_minutes(tmp_path: Path) -> None:
    """By a clock on which each wait takes ten seconds. Then it is measured all the same."""
    slept: list[float] = []
    path = tmp_path / "lock"
    with _locked(path) as first, _locked(path, lambda: 10.0 * len(slept), slept.append) as second:
        assert (True, False) == (first, second)
    assert 12 == len(slept)
    with _locked(path) as free:
        assert free


@pytest.mark.skipif(os.name != "posix", reason="nothing is locked here")
def test_a_lock_through_a_planted_link_creates_no_file(tmp_path: Path) -> None:
    """Its name can be guessed."""
    (path := tmp_path / "lock").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"), _locked(path):
        pass
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("home", ["", "relative"])
def test_without_a_cache_home_it_is_in_the_home(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the XDG base directories are defined: one that is not absolute is none."""
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.setenv("HOME", str(tmp_path))
    on_the_cpu(dtypes=["fp32"])
    assert (tmp_path / ".cache" / "lflops" / "calibration.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "meta"}, "device='meta': pass 'cpu', or a device of torch.accelerator"),
        ({"device": "gpu"}, "device='gpu': pass 'cpu', or a device of torch.accelerator"),
        ({"device": "cuda:99"}, "device='cuda:99': "),
        (
            {"device": "cpu", "dtypes": ["fp32", "fp8"]},
            "dtypes has 'fp8': on cpu, use some of fp64, fp32, fp16, bf16",
        ),
        ({"device": "cpu", "dtypes": "tf32"}, "dtypes has 'tf32': on cpu"),
        ({"device": "cpu", "dtypes": []}, "dtypes=[]: pass some of"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: dict[str, Any], message: str) -> None:
    """With the argument, its value and what is taken."""
    with pytest.raises(HardwareError, match=re.escape(message)):
        calibrate(**arguments, clock=Forbidden())


def state() -> dict[str, object]:
    """What of torch a measurement could change."""
    backends = {
        "cuda": torch.backends.cuda.matmul,
        "mkldnn": getattr(torch.backends.mkldnn, "matmul", None),
    }
    return {
        "threads": torch.get_num_threads(),
        "precision": {
            name: getattr(backend, "fp32_precision", torch.get_float32_matmul_precision())
            for name, backend in backends.items()
        },
        "random numbers": (torch.get_rng_state().tolist(), random.getstate()),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.fixture
def torch_as_it_was() -> Iterator[None]:
    """CleanupStack what a culprit did."""
    threads, numbers = torch.get_num_threads(), torch.get_rng_state()
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
    vars(torch._GLOBAL_DEVICE_CONTEXT).pop(
        "device_context", None
    )  # torch 2.8 cannot say which device is the default one if it is `None`
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
    """Wherever it is measured; also when it fails halfway."""
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
    """Each part of the state has a culprit, planted in the making of a product."""
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
    """A counter that is on has counted nothing."""
    with FlopCounterMode(display=False) as counter:
        on_the_cpu(dtypes=["fp32"])
    assert 0 == counter.get_total_flops()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_fp32_is_measured_in_full_precision_whatever_the_user_chose(
    precision: str, autocast: bool, torch_as_it_was: None
) -> None:
    """A product in bf16 or TF32, whose significands have 8 and 11 bits, is further from the one of doubles."""
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
    left, right = (operand.double() for operand in run.args)
    assert isinstance(product, torch.Tensor)
    assert (product - left @ right).abs().max() < 2**-16


@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"),
    reason="torch 2.9 is the first with a precision for all backends",
)
def test_a_precision_for_all_backends_still_is_one_afterwards(torch_as_it_was: None) -> None:
    """What the user sets for all of them reaches the products: no setting of ours stands before it."""
    torch.backends.fp32_precision = "ieee"
    on_the_cpu(dtypes=["fp32"])
    torch.backends.fp32_precision = "tf32"
    assert "tf32" == torch.backends.mkldnn.matmul.fp32_precision


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_the_operands_are_random_numbers_that_are_always_the_same(dtype: str) -> None:
    """In the dtype that is measured."""
    first, second = (TorchMachine(torch.device("cpu")).product(dtype, 32)() for _ in range(2))
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    assert torch.equal(first, second)
    assert first.std() > 1
    assert {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[
        dtype
    ] == first.dtype


def test_a_copy_copies() -> None:
    """The bytes that were asked for."""
    copied = TorchMachine(torch.device("cpu")).copy(4096)()
    assert isinstance(copied, torch.Tensor)
    assert (4096, 1.0) == (copied.nbytes, copied.mean().item())


def tree(root: Path, files: dict[str, str]) -> Path:
    """A file system of a few files."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def cache(cpu: int, index: int, level: int, size: str, sharers: str) -> dict[str, str]:
    """One of a CPU's caches, as the kernel tells of it."""
    folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
    return {
        f"{folder}/level": f"{level}\n",
        f"{folder}/size": f"{size}\n",
        f"{folder}/shared_cpu_list": f"{sharers}\n",
    }


def test_the_last_level_cache_is_all_of_the_last_level(tmp_path: Path) -> None:
    """Two groups of CPUs with 32 MiB each; the two L2 caches are not of the last level."""
    files = {f"sys/devices/system/cpu/cpu{cpu}/cpufreq": "" for cpu in range(4)}
    for cpu in range(4):
        files |= cache(cpu, 2, 2, "1024K", str(cpu)) | cache(
            cpu, 3, 3, "32768K", "0-1" if cpu < 2 else "2-3"
        )
    assert 64 * MIB == last_level_cache(tree(tmp_path, files))


def test_an_unknown_cache_is_taken_to_be_large(tmp_path: Path) -> None:
    """Also where the kernel tells only a part."""
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
    """The tightest limit counts; files that are only kept in memory are free."""
    assert free == available_memory(tree(tmp_path, {"proc/meminfo": MEMINFO} | files))


def test_unknown_memory_is_taken_to_be_little(tmp_path: Path) -> None:
    """A GiB, where there is no Linux to ask."""
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
    """This machine's chip where the table has it, also where it is named.

    Three quarters of its bf16 are reached.
    """
    monkeypatch.setattr(page, "calibrate", lambda fresh: MEASURED)
    assert 0 == main(["hardware", *arguments, "--measure"])
    out = capsys.readouterr().out
    assert re.search(rf"{chip} +measured +reached", out)
    assert re.search(r"bf16 +989\.50 TFLOP/s +742\.13 TFLOP/s +75\.0 %", out)
    assert re.search(r"fp8 +1\.98 PFLOP/s +– +–", out)
    assert 0 == main(["hardware", *arguments, "--measure", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert ([chip], "NVIDIA H200") == (
        [each["name"] for each in shown["chips"]],
        shown["measured"]["name"],
    )


def test_the_shell_measures_a_machine_that_is_not_in_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to compare it with then."""
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
    """`lflops.calibrate` is the function, though a file has the same name."""
    assert lflops.calibrate is calibrate
