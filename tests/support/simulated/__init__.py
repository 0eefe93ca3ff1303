"""A simulated accelerator for tests: two devices of a PrivateUse1 backend, with planted times.

The times show nothing about real chips. `device.cpp` describes the device. After it is loaded, it
cannot be removed from the process, and torch starts a thread for each device in the first backward.
So the tests in `tests/simulated/` run in a separate process; see their `conftest.py`.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import backend_registration, cpp_extension

NAME = "simulated"

# Torch uses this name for the devices until they are loaded.
FIRST = torch.device("privateuseone", 0)
SECOND = torch.device("privateuseone", 1)
DEVICES = [FIRST, SECOND]

OLDEST = "2.13"
"""The oldest torch that has the C++ functions of the device."""


def _missing() -> str | None:
    if torch.__version__ < OLDEST:
        return f"the simulated device needs torch {OLDEST} or newer"
    if not shutil.which("g++"):
        return "the simulated device is built with g++, and there is none here"
    return None


MISSING = _missing()
"""The reason why the device cannot be built; `None` if it can be built."""

# Seconds of the host for each kernel and each event, unless a test plans others.
LAUNCH = 5e-6
EVENT = 1e-6

# The speed of matmuls and of all other kernels, unless a test plans another time.
MACS_PER_SECOND = 1e12
BYTES_PER_SECOND = 1e11

_SOURCE = Path(__file__).with_name("device.cpp")


class Kernel(NamedTuple):
    """A kernel that ran on a device.

    Attributes:
        name: Name of the operator.
        device: Index of the device.
        stream: Number of the stream.
        start: Its start in seconds of the simulated clock.
        end: Its end in seconds of the simulated clock.
        host_thread: The thread that launched it.
    """

    name: str
    device: int
    stream: int
    start: float
    end: float
    host_thread: int


def built() -> Path:
    """Return the path of the library.

    It is built if this source has not been built for this torch. Other processes wait meanwhile.
    """
    flags = ["-O1", "-std=c++20", "-shared", "-fPIC", "-DUSE_KINETO", "-DFMT_HEADER_ONLY", "-w"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    all_inputs = "\0".join([_SOURCE.read_text("utf-8"), torch.__version__, *flags])
    key = hashlib.sha256(all_inputs.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lflops-tests")
    library = folder / f"simulated-{key}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            includes = cpp_extension.include_paths()
            unfinished = library.with_suffix(".unfinished")
            command = ["g++", *flags]
            command += [f"-isystem{path}" for path in [*includes, f"{includes[0]}/kineto"]]
            command += [str(_SOURCE), "-o", str(unfinished)]
            for path in cpp_extension.library_paths():
                command += ["-L", path]
            command += ["-lc10", "-ltorch_cpu", "-ltorch"]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            assert not done.returncode, done.stderr[-5000:]
            unfinished.rename(library)
    return library


@cache
def load() -> None:
    """Add the two devices to torch, in this process and until it ends."""
    torch.ops.load_library(str(built()))
    _library().simulated_set_up()
    backend_registration.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    backend_registration.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_storage=True
    )
    reset()


def reset() -> None:
    """Restore the default times, and forget the kernels that have run. The clock is not reset."""
    plan()
    for device in range(len(DEVICES)):
        plan_device(device)
    plan_events(timed=True)
    follow_real_clock(follows=False)
    _library().simulated_forget_planned_kernels()
    forget_kernels()


def plan(
    *,
    launch: float = LAUNCH,
    event: float = EVENT,
    macs_per_second: float = MACS_PER_SECOND,
    bytes_per_second: float = BYTES_PER_SECOND,
) -> None:
    """Set the time of the host for each kernel and event, and the speed of kernels."""
    _library().simulated_plan(
        round(launch * 1e9), round(event * 1e9), 1e9 / macs_per_second, 1e9 / bytes_per_second
    )


def plan_kernel(name: str, seconds: float) -> None:
    """Set the time of all kernels of an operator, regardless of their size.

    `name` is the name of an operator, such as "mm" or "relu", or "copy to device", "copy to host"
    or "copy".
    """
    _library().simulated_plan_kernel(name.encode(), round(seconds * 1e9))


def plan_device(device: int, *, slower: float = 1.0, limit: int = 1 << 40) -> None:
    """Set the factor by which all kernels of a device are slower, and its memory in bytes."""
    _library().simulated_plan_device(device, slower, limit)


def plan_events(*, timed: bool) -> None:
    """Set whether the time between two events can be read."""
    _library().simulated_plan_events(int(timed))


def follow_real_clock(*, follows: bool) -> None:
    """Set whether the host clock is the real clock, as it is for events of a trace.

    A wait for the device then takes real time.
    """
    _library().simulated_follow_real_clock(int(follows))


def nanoseconds() -> int:
    """Return the time of the host clock in nanoseconds."""
    return int(_library().simulated_now())


def now() -> float:
    """Return the time of the host clock in seconds."""
    return nanoseconds() / 1e9


def host_works(seconds: float) -> None:
    """Let the host be busy for so many seconds."""
    _library().simulated_host_works(round(seconds * 1e9))


def synchronisations() -> int:
    """Return how often the host has waited for a device."""
    return int(_library().simulated_synchronisations())


@contextmanager
def aside() -> Iterator[None]:
    """Let copies of this thread take no time on the simulated clock, and wait for nothing."""
    _library().simulated_aside(1)
    try:
        yield
    finally:
        _library().simulated_aside(0)


def busy_until(device: int) -> int:
    """Return the time in nanoseconds at which the device's current stream finishes its kernels."""
    return int(_library().simulated_busy_until(device))


def launch(name: str, device: int, nanoseconds: int) -> None:
    """Launch a kernel that computes nothing."""
    _library().simulated_launch(name.encode(), device, nanoseconds)


def forget_kernels() -> None:
    """Clear the list of kernels."""
    _library().simulated_forget_kernels()


def kernels() -> list[Kernel]:
    """Return the kernels since the list was cleared, in the order in which they were launched."""
    found = []
    for line in _library().simulated_kernels().decode().splitlines():
        name, device, stream, start, end, thread = line.split("\t")
        kernel = Kernel(
            name, int(device), int(stream), int(start) / 1e9, int(end) / 1e9, int(thread)
        )
        found.append(kernel)
    return found


@cache
def _library() -> Any:
    library = ctypes.CDLL(str(built()))
    library.simulated_kernels.restype = ctypes.c_char_p
    for name in ("simulated_now", "simulated_synchronisations", "simulated_busy_until"):
        getattr(library, name).restype = ctypes.c_int64
    for name, kinds in {
        "simulated_plan": (ctypes.c_int64, ctypes.c_int64, ctypes.c_double, ctypes.c_double),
        "simulated_plan_kernel": (ctypes.c_char_p, ctypes.c_int64),
        "simulated_plan_device": (ctypes.c_int, ctypes.c_double, ctypes.c_int64),
        "simulated_host_works": (ctypes.c_int64,),
        "simulated_launch": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int64),
    }.items():
        getattr(library, name).argtypes = kinds
    return library


def _module() -> types.ModuleType:
    """Return the module `torch.simulated`, with the functions that torch, Lightning and users need.

    Most of them are the functions of `torch.accelerator`.
    """
    module: Any = types.ModuleType(f"torch.{NAME}", "The simulated devices.")
    accelerator = torch.accelerator
    generators = [torch.ops.simulated.default_generator(device) for device in range(len(DEVICES))]

    @contextmanager
    def device(index: Any) -> Iterator[None]:
        before = accelerator.current_device_index()
        accelerator.set_device_index(_index(index))
        try:
            yield
        finally:
            accelerator.set_device_index(before)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    module.device = device
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: len(DEVICES)
    module.current_device = accelerator.current_device_index
    module.set_device = accelerator.set_device_index
    module.current_stream = accelerator.current_stream
    module.synchronize = accelerator.synchronize
    module.Stream = torch.Stream
    module.Event = torch.Event
    # A stream is a context manager itself.
    module.stream = lambda stream: stream
    module.default_generators = generators
    module.manual_seed = manual_seed_all
    module.manual_seed_all = manual_seed_all
    module.get_rng_state = lambda index=None: generators[_index(index)].get_state()
    module.set_rng_state = lambda state, index=None: generators[_index(index)].set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.get_device_name = lambda index=None: "Simulated Accelerator"
    return module


def _index(index: Any) -> int:
    if isinstance(index, int):
        return index
    given = None if index is None else torch.device(index).index
    return torch.accelerator.current_device_index() if given is None else given
