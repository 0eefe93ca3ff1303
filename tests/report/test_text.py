"""Test names as text."""

import pytest

from lflops.report.text import shortened_name

LORA = "base_model.model.model.layers.*.self_attn.q_proj.lora_B.default ×3"


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (80, LORA),
        (50, "…model.layers.*.self_attn.q_proj.lora_B.default ×3"),
        (43, "…self_attn.q_proj.lora_B.default ×3"),
        (14, "…default ×3"),
        (8, "…def… ×3"),
    ],
)
def test_a_long_name_loses_its_first_parts(width: int, shown: str) -> None:
    """A name that is too long loses its first parts.

    Its last parts say most: the wrappers at the beginning are in the names of all modules.
    """
    assert shown == shortened_name(LORA, width)
