"""Find the peak of a chip for a torch dtype."""

from collections.abc import Mapping

from lflops.hardware.chips import Hardware, named
from lflops.profile.profile import Profile

# Complex dtypes have the peak of their real dtypes, because a complex MAC is counted as real MACs.
_PEAKS: Mapping[str, str] = {
    "float64": "fp64",
    "complex128": "fp64",
    "float32": "fp32",
    "complex64": "fp32",
    "float16": "fp16",
    "complex32": "fp16",
    "bfloat16": "bf16",
    "int8": "int8",
    "uint8": "int8",
    "qint8": "int8",
    "quint8": "int8",
}

# The key is the part of the dtype's name before the first underscore.
_FAMILIES: Mapping[str, str] = {"float8": "fp8", "float4": "fp4", "tf32": "tf32"}


def chip_of(profile: Profile, hardware: Hardware | str | None) -> Hardware | None:
    """Return the chip that a user passed or named, or else the chip of the profile's run.

    Returns `None` if no chip was passed and the profile has none.

    Raises:
        HardwareError: The name is unknown.
    """
    if isinstance(hardware, str):
        hardware = named(hardware)
    return hardware or profile.run.hardware


def name_of_peak(dtype: str | None, chip: Hardware | None = None) -> str | None:
    """Convert the name of a torch dtype, such as `bfloat16`, to a name in `DTYPES`, such as `bf16`.

    `dtype` may also be `tf32`, which becomes `fp32` if the chip has no TF32. Returns `None` if
    `DTYPES` has no name for the dtype.
    """
    if dtype is None:
        return None
    name = _PEAKS.get(dtype) or _FAMILIES.get(dtype.partition("_")[0])
    if name == "tf32" and chip is not None and name not in chip.peak_flops_per_second:
        return "fp32"
    return name


def peak_of(dtype: str | None, chip: Hardware | None) -> float | None:
    """Return the peak FLOP/s of a chip for a dtype, or `None` if it is unknown."""
    name = name_of_peak(dtype, chip)
    if chip is None or name is None:
        return None
    return chip.peak_flops_per_second.get(name)
