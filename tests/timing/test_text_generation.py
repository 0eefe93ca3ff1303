"""Generating text: what the prompt costs, and what each further token does."""

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
    """What generating is timed by."""
    still = StillClock()
    monkeypatch.setattr("lflops.timing.measure.clock_of", lambda _device: still)
    return still


def measured(model: nn.Module, *args: Any, **kwargs: Any) -> Profile:
    """With as few passes as can be."""
    return measure_generate(model, args, kwargs, warmup=0, repeats=1)


def generated(profile: Profile) -> Note:
    """What is said of prefill and decode."""
    (note,) = (note for note in profile.notes if note.code == "generated")
    return note


BATCH, PROMPT, WIDTH, HEADS, LAYERS, WORDS, NEW = 2, 4, 8, 2, 2, 16, 3
LINEAR = WIDTH * 3 * WIDTH + WIDTH * WIDTH + 2 * WIDTH * 4 * WIDTH
"""Of a layer for each token: queries, keys and values, the projection, the two layers behind."""


def attention(queries: int, keys: int) -> int:
    """Each query with each key, and the weights with the values."""
    return 2 * queries * keys * WIDTH


@pytest.fixture
def gpt2() -> nn.Module:
    """The real thing, a few thousand parameters of it."""
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
    """A prompt of 4 tokens, of which the last alone gets logits.

    Then 2 tokens, which look back at 5 and 6.
    """
    profile = measured(
        gpt2, torch.ones(BATCH, PROMPT, dtype=torch.long), max_new_tokens=NEW, do_sample=False
    )
    logits = WIDTH * WORDS
    prefill = BATCH * (PROMPT * LAYERS * LINEAR + LAYERS * attention(PROMPT, PROMPT) + logits)
    decode = BATCH * sum(
        LAYERS * LINEAR + LAYERS * attention(1, keys) + logits for keys in (PROMPT + 1, PROMPT + 2)
    )
    values = generated(profile).values
    assert (prefill, decode, NEW - 1) == (
        values["prefill_macs"],
        values["decode_macs"],
        values["decode_calls"],
    )
    assert prefill + decode == profile.total()
    assert profile.modules[""].forward.flops == values["prefill_flops"] + values["decode_flops"]
    assert values["decode_flops"] > 2 * values["decode_macs"]


def test_its_steps_have_both_and_their_sum(gpt2: nn.Module) -> None:
    """By this machine's own clock; both are forward, and there is nothing else."""
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
    """Calls itself as often as it is told, and does something of its own before each time."""

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
    """1 + 4 s; decode is two such calls, and the 16 s behind them."""
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
    """A model that writes all at once has a forward like any other."""
    profile = measured(Writer(clock), x, times=times)
    assert () == profile.notes
    assert [{"forward": 5 * times + 16}] * 2 == [step.phases for step in profile.steps]
    assert times * ONCE == profile.total()


class Wrapper(nn.Module):
    """Has another write."""

    def __init__(self, writer: nn.Module) -> None:
        super().__init__()
        self.writer = writer

    def generate(self, x: Tensor, times: int) -> Tensor:
        return self.writer.generate(x, times)


def test_where_a_part_of_it_writes_they_are_not_told_apart(clock: StillClock) -> None:
    """It is not the model itself that is called; its work and its time are there all the same."""
    profile = measured(Wrapper(Writer(clock)), x, 2)
    assert () == profile.notes
    assert [{"forward": 26}] * 2 == [step.phases for step in profile.steps]
    assert 2 * ONCE == profile.total()
    assert profile.modules["writer.body.0"].forward.seconds.median == 8


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_wrapper_of_torchs_is_told_apart_as_what_it_wraps_is(clock: StillClock) -> None:
    """`torch.compile` gives a module that is not the one that calls itself."""
    torch.compiler.reset()
    values = generated(measured(torch.compile(Writer(clock), backend="eager"), x, times=3)).values
    assert (ONCE, 2 * ONCE, 2) == (
        values["prefill_macs"],
        values["decode_macs"],
        values["decode_calls"],
    )


def test_what_is_ignored_takes_its_work_and_its_time_with_it(clock: StillClock) -> None:
    """4 s of each call."""
    profile = measure_generate(
        Writer(clock), (x,), {"times": 2}, warmup=0, repeats=1, ignore=["body.0"]
    )
    assert profile.modules[""].forward.seconds.median == 2 + 16


def in_its_second_pass(clock: StillClock, x: Tensor) -> None:
    """An error in a pass that is timed."""
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
    """All goes well."""
    writer = Writer(clock)
    before = everything(writer, x)
    measured(writer, x, times=2)
    assert [] == differences(before, everything(writer, x))


@pytest.mark.parametrize("way", [as_it_should, in_its_second_pass])
def test_generating_leaves_no_trace(
    clock: StillClock, way: Callable[[StillClock, Tensor], None]
) -> None:
    """Neither on the model, which is told from others by a hook while it writes, nor anywhere."""
    way(clock, torch.ones(3, 2))


def test_a_wrong_argument_is_named() -> None:
    """As those of `measure` are."""
    with pytest.raises(lflops.CountError, match=r"measure_generate: args is a list"):
        measure_generate(nn.Linear(2, 2), [x])
