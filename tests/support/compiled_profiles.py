"""A handmade profile with compiled code, small enough to check by hand."""

from msgspec.structs import replace

from lflops.profile.profile import Profile
from lflops.profile.records import CompiledCode, CompiledKernel, Phase
from tests.support.profile_builders import small_profile


def kernel(
    name: str, module: str, phase: Phase, *, moved: int | None, took: float = 1e-5, modules: int = 1
) -> CompiledKernel:
    """Return a kernel that ran once in each of two batches.

    Args:
        name: The name in generated code.
        module: The module that the kernel computes for.
        phase: The phase in which it ran.
        moved: Its bytes per batch; `None` if they are unknown.
        took: Its host seconds per batch.
        modules: Number of modules that the kernel computes for.
    """
    return CompiledKernel(
        name=name,
        module=module,
        phase=phase,
        modules=modules,
        calls=2,
        host_seconds=2 * took,
        bytes_moved=None if moved is None else 2 * moved,
    )


def compiled_profile() -> Profile:
    """Return the small profile with a compiled encoder.

    Bytes per batch:

    - forward: the dispatched operators move 960 (matmul) and 512 (GELU), the kernels 960 and 256
    - backward: the dispatched gradient of GELU moves 768, its kernel 512 and 64 more, because it
      computes GELU again; the bytes of the matmul's kernel are unknown
    """
    kernels = (
        kernel("extern_kernels.addmm", "encoder.0", "forward", moved=960, took=4e-5),
        kernel("cpp_fused_gelu_0", "encoder.1", "forward", moved=256, took=2e-5, modules=2),
        kernel("cpp_fused_gelu_gelu_backward_1", "encoder.1", "backward", moved=512),
        kernel("cpp_fused_gelu_gelu_backward_1", "encoder.1", "recompute", moved=64),
        kernel("extern_kernels.mm", "encoder.0", "backward", moved=None),
    )
    code = CompiledCode(
        graphs=2,
        unrecorded_graphs=0,
        regions=4,
        timed_on="host",
        seconds=2e-4,
        unassigned_seconds=2e-5,
        divided_seconds=4e-5,
        kernels=kernels,
    )
    given = small_profile()
    assert given.trace is not None
    modules = {}
    for name, module in given.modules.items():
        modules[name] = replace(module, compiled=name == "encoder")
    trace = replace(given.trace, compiled=code)
    return replace(given, modules=modules, trace=trace)
