"""Test the bytes that fusion saves: compiled kernels move fewer bytes than dispatched operators.

The docstring of `compiled_profile` has the bytes from which the expected values are worked out.
"""

from msgspec.structs import replace

from lflops.analysis.roofline import Fusion, LazyRoofline, fusion, roofline
from lflops.analysis.tree import fold_parts
from lflops.profile.notes import Note
from lflops.profile.records import Phase
from tests.support.compiled_profiles import compiled_profile, kernel
from tests.support.profile_builders import cell, small_profile

FUSION = (
    Fusion(phase="forward", bytes_moved=960 + 512, fused_bytes=960 + 256, unknown_modules=0),
    Fusion(phase="backward", bytes_moved=768, fused_bytes=512 + 64, unknown_modules=1),
)


def test_fusion_saves_what_kernels_do_not_move() -> None:
    """The fused bytes are the bytes of the kernels, as the mean of two batches.

    The compiler computes GELU again in backward, so these bytes are part of backward. A kernel
    with unknown bytes is not included.
    """
    assert fusion(compiled_profile()) == FUSION


def test_a_step_of_several_batches_moves_as_many_times() -> None:
    """The bytes of kernels are scaled from a batch to a step, because counts are for a step.

    A step of two batches has twice the bytes of the mean batch.
    """
    given = compiled_profile()
    forward, _ = fusion(replace(given, run=replace(given.run, accumulation=2)))
    assert forward.fused_bytes == 2 * (960 + 256)


def test_what_the_code_as_written_computes_again_has_its_own_phase() -> None:
    """If operators were also dispatched in recompute, recompute is a separate phase.

    Here, the user's code checkpoints the GELU.
    """
    given = compiled_profile()
    checkpointed = replace(
        given,
        op_counts=(*given.op_counts, cell("encoder.1", "aten::gelu", "recompute", bytes_moved=512)),
    )
    assert [(each.phase, each.fused_bytes) for each in fusion(checkpointed)] == [
        ("forward", 1216),
        ("backward", 512),
        ("recompute", 64),
    ]


def test_nothing_is_saved_where_nothing_is_known() -> None:
    """Without compiled code or without a count, the result is empty."""
    assert fusion(small_profile()) == ()
    assert (
        fusion(
            replace(compiled_profile(), notes=(Note(code="not_counted", subject="", values={}),))
        )
        == ()
    )


def test_a_point_has_the_bytes_of_its_kernels() -> None:
    """Each point of the roofline has the bytes of its kernels, for self and for inclusive work.

    The head is not compiled. In the sums, it counts with the 424 bytes of its operators.
    """
    found = roofline(compiled_profile())
    own = {(point.module, point.phase): point.fused_bytes for point in found.self_work}
    names: tuple[tuple[str, Phase], ...] = (
        ("encoder.0", "forward"),
        ("encoder.1", "forward"),
        ("encoder.1", "backward"),
    )
    assert [own[name] for name in names] == [960, 256, 576]
    assert {own["encoder.0", "backward"], own["head", "forward"]} == {None}
    whole = {
        (point.module, point.phase): (point.bytes_moved, point.fused_bytes)
        for point in found.modules
    }
    assert whole["encoder", "forward"] == (1472, 1216)
    assert whole["", "forward"] == (1472 + 424, 1216 + 424)
    assert whole["", "backward"][1] is whole["head", "forward"][1] is None


def test_repeated_modules_add_their_bytes_up() -> None:
    """Two modules with 960 bytes each have 1920 bytes. If one is unknown, the sum is unknown."""
    part = next(
        part for part in LazyRoofline(compiled_profile(), None).self_work if part.fused_bytes == 960
    )
    patterns = {"a.0": "a.*", "a.1": "a.*"}
    for other, total in ((960, 1920), (None, None)):
        pair = (replace(part, module="a.0"), replace(part, module="a.1", fused_bytes=other))
        assert [
            (len(each.parts), each.point.fused_bytes) for each in fold_parts(pair, patterns)
        ] == [(2, total)]


def test_a_kernel_of_a_module_without_operators_counts_as_well() -> None:
    """The compiler may assign a kernel to a container, for example a fused copy of 8 bytes."""
    given = compiled_profile()
    assert given.trace is not None
    assert given.trace.compiled is not None
    code = replace(
        given.trace.compiled,
        kernels=(
            *given.trace.compiled.kernels,
            kernel("cpp_fused_2", "encoder", "forward", moved=8),
        ),
    )
    found = replace(given, trace=replace(given.trace, compiled=code))
    assert fusion(found)[0].fused_bytes == 1224
    whole = {(point.module, point.phase): point.fused_bytes for point in roofline(found).modules}
    assert whole["encoder", "forward"] == 1224
