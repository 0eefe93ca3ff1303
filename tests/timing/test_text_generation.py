"""Test `measure_generate`: the work and the time of the prompt (prefill) and of decode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lflops
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.timing.measure import measure_generate
from tests.support.fake_clock import StillClock
from tests.support.process_state import differences, everything
from tests.support.timed_modules import Part

pytestmark = pytest.mark.usefixtures("undisturbed")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StillClock:
    """Return the clock that `measure_generate` uses in this test."""
    still = StillClock()
    monkeypatch.setattr("lflops.timing.measure.clock_of", lambda _device: still)
    return still


def measured(model: nn.Module, *args: Any, **kwargs: Any) -> Profile:
    """Measure a generation with as few passes as possible."""
    return measure_generate(model, args, kwargs, warmup=0, repeats=1)


def generated(profile: Profile) -> Note:
    """Return the note about prefill and decode."""
    (note,) = (note for note in profile.notes if note.code == "generated")
    return note


BATCH = 2
PROMPT = 4
WIDTH = 8
HEADS = 2
LAYERS = 2
WORDS = 16
NEW = 3
LINEAR = WIDTH * 3 * WIDTH + WIDTH * WIDTH + 2 * WIDTH * 4 * WIDTH
"""MACs of the linear layers in one block for one token.

These are the queries, keys and values, the projection, and the two layers of the MLP.
"""


def attention(queries: int, keys: int) -> int:
    """Return the MACs of attention: queries with keys, and attention weights with values."""
    return 2 * queries * keys * WIDTH


@pytest.fixture
def gpt2() -> nn.Module:
    """Return a GPT-2 model with a few thousand parameters."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config).eval()
    return model


def test_a_prompt_and_the_tokens_behind_it(gpt2: nn.Module) -> None:
    """Prefill has the MACs of the prompt, and decode those of the generated tokens.

    The prompt has 4 tokens, and logits are computed only for the last of them. Then two more tokens
    are generated, which attend to 5 and 6 tokens.
    """
    profile = measured(
        gpt2, torch.ones(BATCH, PROMPT, dtype=torch.long), max_new_tokens=NEW, do_sample=False
    )
    logits = WIDTH * WORDS
    prefill = BATCH * (PROMPT * LAYERS * LINEAR + LAYERS * attention(PROMPT, PROMPT) + logits)
    decode = 0
    for keys in (PROMPT + 1, PROMPT + 2):
        decode += BATCH * (LAYERS * LINEAR + LAYERS * attention(1, keys) + logits)
    values = generated(profile).values
    assert prefill == values["prefill_macs"]
    assert decode == values["decode_macs"]
    assert NEW - 1 == values["decode_calls"]
    assert prefill + decode == profile.total()
    assert profile.modules[""].forward.flops == values["prefill_flops"] + values["decode_flops"]
    assert values["decode_flops"] > 2 * values["decode_macs"]


def test_its_steps_have_both_and_their_sum(gpt2: nn.Module) -> None:
    """Each step has the times of prefill, decode and forward, which is their sum.

    This test uses the clock of the machine. Generation has no other phase.
    """
    profile = measured(
        gpt2, torch.ones(BATCH, PROMPT, dtype=torch.long), max_new_tokens=NEW, do_sample=False
    )
    for step in profile.steps:
        assert ["forward", "prefill", "decode"] == list(step.phases)
        assert step.phases["forward"] == step.phases["prefill"] + step.phases["decode"]
        assert step.phases["forward"] == pytest.approx(step.seconds)
    assert profile.modules[""].forward.seconds.median == pytest.approx(
        profile.steps[0].phases["forward"]
    )
    assert (BATCH, BATCH * NEW) == (profile.run.samples_per_step, profile.run.tokens_per_step)


class Writer(nn.Module):
    """A model that calls itself several times in `generate`.

    Each call takes 4 s, with 1 s before it. `generate` takes 16 s more after the last call.
    """

    def __init__(self, clock: StillClock) -> None:
        super().__init__()
        self.clock = clock
        self.body = nn.Sequential(Part(clock, 4), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def generate(self, x: Tensor, times: int = 1) -> Tensor:
        for _ in range(times):
            self.clock.advance(1)
            x = self(x)
        self.clock.advance(16)
        return x


x = torch.ones(3, 2)
ONCE = 3 * 2 * 2


def test_prefill_is_all_up_to_the_end_of_the_first_call(clock: StillClock) -> None:
    """Prefill ends with the first call of the model, and decode is the rest.

    Prefill takes 1 + 4 s. Decode takes two such calls and the 16 s after them.
    """
    profile = measured(Writer(clock), x, times=3)
    assert [{"forward": 5 + 26, "prefill": 5, "decode": 26}] * 2 == [
        step.phases for step in profile.steps
    ]
    values = generated(profile).values
    assert (ONCE, 2 * ONCE, 2) == (
        values["prefill_macs"],
        values["decode_macs"],
        values["decode_calls"],
    )
    assert {"": 31, "body": 12, "body.0": 12, "body.1": 0} == {
        name: row.forward.seconds.median for name, row in profile.modules.items()
    }
    assert profile.modules[""].forward.self_seconds.median == 3 + 16
    assert profile.modules[""].calls == 3


@pytest.mark.parametrize("times", [0, 1])
def test_where_the_model_is_not_called_twice_they_are_not_told_apart(
    clock: StillClock, times: int
) -> None:
    """If the model is called at most once, there is only forward, without prefill and decode."""
    profile = measured(Writer(clock), x, times=times)
    assert () == profile.notes
    assert [{"forward": 5 * times + 16}] * 2 == [step.phases for step in profile.steps]
    assert times * ONCE == profile.total()


class Wrapper(nn.Module):
    """A model that calls `generate` of another module."""

    def __init__(self, writer: nn.Module) -> None:
        super().__init__()
        self.writer = writer

    def generate(self, x: Tensor, times: int) -> Tensor:
        return self.writer.generate(x, times)


def test_where_a_part_of_it_writes_they_are_not_told_apart(clock: StillClock) -> None:
    """If only a submodule generates, there is only forward, because the model is not called.

    The work and the time of the submodule are still measured.
    """
    profile = measured(Wrapper(Writer(clock)), x, 2)
    assert () == profile.notes
    assert [{"forward": 26}] * 2 == [step.phases for step in profile.steps]
    assert 2 * ONCE == profile.total()
    assert profile.modules["writer.body.0"].forward.seconds.median == 8


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_wrapper_of_torchs_is_told_apart_as_what_it_wraps_is(clock: StillClock) -> None:
    """A model in a wrapper of `torch.compile` has prefill and decode like the model itself.

    Within `generate`, the original model is called, not the wrapper.
    """
    torch.compiler.reset()
    values = generated(measured(torch.compile(Writer(clock), backend="eager"), x, times=3)).values
    assert (ONCE, 2 * ONCE, 2) == (
        values["prefill_macs"],
        values["decode_macs"],
        values["decode_calls"],
    )


def test_what_is_ignored_takes_its_work_and_its_time_with_it(clock: StillClock) -> None:
    """The 4 s of `body.0` in each call are in no total, because this module is ignored."""
    profile = measure_generate(
        Writer(clock), (x,), {"times": 2}, warmup=0, repeats=1, ignore=["body.0"]
    )
    assert profile.modules[""].forward.seconds.median == 2 + 16


def in_its_second_pass(clock: StillClock, x: Tensor) -> None:
    """Check that the model is unchanged after an error in a timed pass."""
    writer = Writer(clock)
    calls: list[Tensor] = []

    def fail(*_: Any) -> None:
        calls.append(x)
        if len(calls) == 4:
            raise ValueError("planted")

    handle = writer.body.register_forward_hook(fail)
    before = everything(writer, x)
    with pytest.raises(ValueError, match="planted"):
        measured(writer, x, times=2)
    assert [] == differences(before, everything(writer, x))
    handle.remove()


def as_it_should(clock: StillClock, x: Tensor) -> None:
    """Check that the model is unchanged after a measurement without errors."""
    writer = Writer(clock)
    before = everything(writer, x)
    measured(writer, x, times=2)
    assert [] == differences(before, everything(writer, x))


@pytest.mark.parametrize("way", [as_it_should, in_its_second_pass])
def test_generating_leaves_no_trace(
    clock: StillClock, way: Callable[[StillClock, Tensor], None]
) -> None:
    """A measurement leaves the model and the process unchanged, also after an error.

    During the measurement, there is a hook on the calls of the model.
    """
    way(clock, torch.ones(3, 2))


def test_a_wrong_argument_is_named() -> None:
    """The error message for a wrong argument names the function and the argument."""
    with pytest.raises(lflops.CountError, match=r"measure_generate: args is a list"):
        measure_generate(nn.Linear(2, 2), [x])
