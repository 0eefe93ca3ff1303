"""Which of a chip's peaks a dtype of torch is computed at."""

from collections.abc import Mapping

from lflops.hardware.chips import Hardware, named
from lflops.profile.profile import Profile

# The MACs of complex numbers are counted in reals.
_PEAKS = {
    **dict.fromkeys(("float64", "complex128"), "fp64"),
    **dict.fromkeys(("float32", "complex64"), "fp32"),
    **dict.fromkeys(("float16", "complex32"), "fp16"),
    "bfloat16": "bf16",
    **dict.fromkeys(("int8", "uint8", "qint8", "quint8"), "int8"),
}
_FAMILIES: Mapping[str, str] = {"float8": "fp8", "float4": "fp4", "tf32": "tf32"}


def chip_of(profile: Profile, hardware: Hardware | str | None) -> Hardware | None:
    """The hardware that is given, or that of this name, or else what the run says it is.

    An unknown name is a `HardwareError`.
    """
    return (named(hardware) if isinstance(hardware, str) else hardware) or profile.run.hardware


def name_of_peak(dtype: str | None, chip: Hardware | None = None) -> str | None:
    """The peak's name of a dtype of torch, or of `tf32`.

    A chip without TF32 multiplies float32 in full.
    """
    name = None if dtype is None else _PEAKS.get(dtype) or _FAMILIES.get(dtype.partition("_")[0])
    return (
        "fp32"
        if name == "tf32" and chip is not None and name not in chip.peak_flops_per_second
        else name
    )


def peak_of(dtype: str | None, chip: Hardware | None) -> float | None:
    """FLOP/s of a dtype; `None` where the chip is not known to have it."""
    return None if chip is None else chip.peak_flops_per_second.get(name_of_peak(dtype, chip) or "")
