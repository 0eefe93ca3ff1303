"""Test the recording of the graphs that inductor compiles.

lflops checks inductor before it records, and restores inductor's settings afterwards.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lflops.errors import CountError
from lflops.torch_private import self_check as torch_check
from lflops.trace.record.compiled_time import CompileTracking

try:
    from lflops.torch_private import inductor
except CountError:
    pytest.skip(
        "this torch's inductor has other names: test_inside_compiled.py tests that this is said",
        allow_module_level=True,
    )


def gone(*_: object) -> Any:
    """Raise the error of a name that does not exist."""
    raise AttributeError("no such name")


INDUCTOR_LIES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "nothing is recorded": (
        "record_graphs",
        lambda: lambda: None,
        "compiled graphs are not recorded",
    ),
    "settings are gone": ("record_graphs", gone, "no such name"),
    "calls have no numbers": (
        "kernel_calls",
        lambda source: (),
        "compiled kernels are called without a call number",
    ),
    "keys without a graph": (
        "keys_have_graphs",
        lambda: False,
        "cache keys of compiled graphs cannot contain module names",
    ),
    "nodes are elsewhere": (
        "recorded_names",
        lambda text: ({}, {}),
        "the graph nodes of compiled kernels are unknown",
    ),
}
"""Changed behavior of inductor, and the text that the refusal must contain.

Each value is the name of a function of lflops, its replacement, and the text.
"""


@pytest.mark.parametrize(("name", "lie", "said"), INDUCTOR_LIES.values(), ids=INDUCTOR_LIES)
def test_an_inductor_that_means_something_else_records_nothing(
    name: str, lie: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If inductor behaves differently, nothing is recorded, and the refusal says why.

    Compiled modules then have only one row each. The next monitor checks inductor again.
    """
    torch_check.check_inductor.cache_clear()
    refused = CompileTracking()
    tracking = CompileTracking()
    with monkeypatch.context() as torch_changes:
        torch_changes.setattr(inductor, name, lie)
        refused.start()
        refused.stop()
    assert refused.refusal is not None
    assert f"torch {torch.__version__}: " in refused.refusal
    assert said in refused.refusal
    assert not inductor.is_recording()
    tracking.start()
    assert (tracking.refusal, inductor.is_recording()) == (None, True)
    tracking.stop()
    assert not inductor.is_recording()


def test_a_second_monitor_shares_the_settings_and_the_last_restores_them() -> None:
    """Two monitors share inductor's settings, and the last monitor that stops restores them.

    If the user has set the same setting, it is left unchanged, and recording is refused.
    """
    first = CompileTracking()
    second = CompileTracking()
    refused = CompileTracking()
    first.start()
    second.start()
    first.stop()
    first.stop()
    assert inductor.is_recording()
    second.stop()
    assert not inductor.is_recording()
    with torch._inductor.config.patch(_post_fusion_custom_pass=list):
        refused.start()
        assert torch._inductor.config._post_fusion_custom_pass is list
    assert "config._post_fusion_custom_pass is already set" in str(refused.refusal)
