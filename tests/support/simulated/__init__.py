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
DEVICES = FIRST, SECOND = [
    torch.device("privateuseone", index) for index in range(2)
]  # as torch calls them until they are loaded
OLDEST = "2.13"  # torch, whose C++ the device is written for; older ones have other functions


def _missing() -> str | None:
    if torch.__version__ < OLDEST:
        return f"the simulated device needs torch {OLDEST} or newer"
    return (
        None
        if shutil.which("g++")
        else "the simulated device is built with g++, and there is none here"
    )


MISSING = _missing()
"""Why it cannot be built; `None` where it can."""

LAUNCH, EVENT = 5e-6, 1e-6
"""Seconds of the host for each kernel and each event, unless a test plants others."""

MACS_PER_SECOND, BYTES_PER_SECOND = 1e12, 1e11
"""What matrix products take, and all other kernels, unless a test plants another time."""

_SOURCE = Path(__file__).with_name("device.cpp")


class Kernel(NamedTuple):
    """What ran on a device; seconds of the simulated clock."""

    name: str
    device: int
    stream: int
    start: float
    end: float
    host_thread: int  # which launched it


def built() -> Path:
    """The library, built where nobody has built this source for this torch before.

    Who comes meanwhile waits.
    """
    flags = ["-O1", "-std=c++20", "-shared", "-fPIC", "-DUSE_KINETO", "-DFMT_HEADER_ONLY", "-w"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    key = hashlib.sha256(
        "\0".join([_SOURCE.read_text("utf-8"), torch.__version__, *flags]).encode()
    ).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lflops-tests")
    library = folder / f"simulated-{key}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            includes = cpp_extension.include_paths()
            links = [option for path in cpp_extension.library_paths() for option in ("-L", path)]
            unfinished = library.with_suffix(".unfinished")
            command = [
                "g++",
                *flags,
                *(f"-isystem{path}" for path in [*includes, f"{includes[0]}/kineto"]),
            ]
            command += [
                str(_SOURCE),
                "-o",
                str(unfinished),
                *links,
                "-lc10",
                "-ltorch_cpu",
                "-ltorch",
            ]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            assert not done.returncode, done.stderr[-5000:]
            unfinished.rename(library)
    return library


@cache
def load() -> None:
    """Make the two devices part of torch, in this process and until it ends."""
    torch.ops.load_library(str(built()))
    _library().simulated_set_up()
    backend_registration.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    backend_registration.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_storage=True
    )
    reset()


def reset() -> None:
    """Plant what is planted by default, and forget the kernels so far. The clock goes on."""
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
    """What the host takes for a kernel and for an event, and how fast kernels are."""
    _library().simulated_plan(
        round(launch * 1e9), round(event * 1e9), 1e9 / macs_per_second, 1e9 / bytes_per_second
    )


def plan_kernel(name: str, seconds: float) -> None:
    """What every kernel of an operator takes, of any size.

    "mm", "addmm", "relu", "copy to device", or another operator's name.
    """
    _library().simulated_plan_kernel(name.encode(), round(seconds * 1e9))


def plan_device(device: int, *, slower: float = 1.0, limit: int = 1 << 40) -> None:
    """How many times as long each kernel of a device takes, and the bytes of its memory."""
    _library().simulated_plan_device(device, slower, limit)


def plan_events(*, timed: bool) -> None:
    """Whether the time between two events can be read."""
    _library().simulated_plan_events(int(timed))


def follow_real_clock(*, follows: bool) -> None:
    """Whether the host's clock is the real one, as a trace has it.

    Then to wait for the device takes real time.
    """
    _library().simulated_follow_real_clock(int(follows))


def nanoseconds() -> int:
    """The host's clock."""
    return int(_library().simulated_now())


def now() -> float:
    """The host's clock, in seconds."""
    return nanoseconds() / 1e9


def host_works(seconds: float) -> None:
    """Let the host be busy for a while."""
    _library().simulated_host_works(round(seconds * 1e9))


def synchronisations() -> int:
    """How often the host has waited for a device until now."""
    return int(_library().simulated_synchronisations())


@contextmanager
def aside() -> Iterator[None]:
    """What this thread copies within it takes no time and waits for nobody, on the simulated clock."""
    _library().simulated_aside(1)
    try:
        yield
    finally:
        _library().simulated_aside(0)


def busy_until(device: int) -> int:
    """The moment, in nanoseconds, at which the device's current stream is done with all that was launched."""
    return int(_library().simulated_busy_until(device))


def launch(name: str, device: int, nanoseconds: int) -> None:
    """Launch a kernel that computes nothing."""
    _library().simulated_launch(name.encode(), device, nanoseconds)


def forget_kernels() -> None:
    """Begin the list of kernels anew."""
    _library().simulated_forget_kernels()


def kernels() -> list[Kernel]:
    """What ran since the list began, in the order of launching."""
    rows = [line.split("\t") for line in _library().simulated_kernels().decode().splitlines()]
    return [
        Kernel(name, int(device), int(stream), int(start) / 1e9, int(end) / 1e9, int(thread))
        for name, device, stream, start, end, thread in rows
    ]


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
    """What torch, Lightning and users ask a device for as `torch.simulated`.

    As other backends have it, by `torch.accelerator`.
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
    module.is_available = module.is_initialized = lambda: True
    module.init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: len(DEVICES)
    module.current_device = accelerator.current_device_index
    module.set_device = accelerator.set_device_index
    module.current_stream = accelerator.current_stream
    module.synchronize = accelerator.synchronize
    module.Stream, module.Event = torch.Stream, torch.Event
    module.stream = lambda stream: stream  # which is a context itself
    module.default_generators = generators
    module.manual_seed = module.manual_seed_all = manual_seed_all
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
