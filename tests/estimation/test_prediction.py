"""Test predicted step times against times worked out by hand, for a chip with round peaks."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import lflops
from lflops.estimation.prediction import Family, Rates, Widening, fitted, predict, why_not
from lflops.hardware.chips import Hardware

FAST = 1e30
RATES = Rates(
    families={
        "round": Family(
            chips=("round",), product=0.5, attention=0.25, network_bytes_per_second=10.0
        )
    },
    bandwidth=0.5,
    link=1.0,
    contention=0.0,
    lag_seconds=0.0,
    launch_seconds=0.0,
    host_seconds=0.0,
    low=0.75,
    high=1.5,
)
FORWARD = 128 * 64 * 32
"""MACs of forward. The weight's gradient needs as many; the input needs no gradient."""


def chip(*, peak: float = FAST, bandwidth: float = FAST, link: float = FAST) -> Hardware:
    """Return a chip on which only the passed limits take time."""
    return Hardware("round", {"bf16": peak}, bandwidth, link_bytes_per_second=link)


def linear(**options: Any) -> lflops.Profile:
    """Estimate a linear layer, by default forward and backward in bfloat16."""
    module = nn.Linear(64, 32, bias=False, dtype=options.pop("dtype", torch.bfloat16))
    return lflops.estimate(
        module, torch.zeros(128, 64, dtype=module.weight.dtype), **{"backward": True, **options}
    )


class Blocks(nn.Module):
    """Three blocks of 64 parameters, and no other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, bias=False)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Call one block after the other."""
        for block in self.blocks:
            x = block(x)
        return x


def sharded(ranks: int) -> lflops.Profile:
    """Estimate one rank of the blocks under FSDP2."""
    return lflops.estimate(
        lambda: Blocks().to(torch.bfloat16),
        torch.zeros(4, 8, dtype=torch.bfloat16),
        backward=True,
        mesh={"data": ranks},
    )


def test_products_take_their_share_of_the_peak() -> None:
    """Matmuls run at the fitted share of the peak.

    Forward is one matmul, and the gradient of the weight is another one of the same size.
    """
    found = predict(linear(), chip(peak=1e12), rates=RATES)
    assert found is not None
    assert found.seconds == pytest.approx(2 * 2 * FORWARD / 0.5e12)
    assert found.by_phase["forward"] == pytest.approx(2 * FORWARD / 0.5e12)
    assert (found.low, found.high) == pytest.approx((0.75 * found.seconds, 1.5 * found.seconds))


def test_bytes_take_their_share_of_the_bandwidth() -> None:
    """Bytes move at the fitted share of the bandwidth.

    Forward moves the input, the weight and the output with two bytes per element.
    """
    found = predict(linear(), chip(bandwidth=1e9), rates=RATES)
    assert found is not None
    assert found.by_phase["forward"] == pytest.approx((128 * 64 + 64 * 32 + 128 * 32) * 2 / 0.5e9)


def test_each_call_adds_a_launch() -> None:
    """Each operator adds the time of a launch; forward is one operator."""
    found = predict(linear(), chip(), rates=replace(RATES, launch_seconds=1.0))
    assert found is not None
    assert found.by_phase["forward"] == pytest.approx(1.0)


TRANSFER = 128 / 2 / 1e3
"""Seconds of one collective of a block.

A block has 128 bytes, and in a ring of two ranks each rank sends half of them.
"""


def test_collectives_that_nothing_hides_take_their_time() -> None:
    """Without work to hide them, all nine collectives are exposed.

    They are three gathers in forward, three gathers in backward and three reductions.
    """
    found = predict(sharded(2), chip(link=1e3), rates=RATES)
    assert found is not None
    assert found.by_kind["communication"] == pytest.approx(9 * TRANSFER)
    assert found.by_module["blocks.1"] > 0


def test_work_hides_all_but_the_first_gathers_and_the_last_reduction() -> None:
    """Three of nine collectives are exposed: the first gather of each pass and the last reduction.

    Forward and backward each begin with a gather that no work precedes, and no work follows the
    last reduction.
    """
    found = predict(sharded(2), chip(peak=1.0, link=1e3), rates=RATES)
    assert found is not None
    assert found.by_kind["communication"] == pytest.approx(3 * TRANSFER)


def test_hidden_collectives_slow_down_what_hides_them() -> None:
    """The six hidden collectives add the fitted contention to the three exposed ones."""
    found = predict(sharded(2), chip(peak=1.0, link=1e3), rates=replace(RATES, contention=0.25))
    assert found is not None
    assert found.by_kind["communication"] == pytest.approx((3 + 6 * 0.25) * TRANSFER)


def test_more_ranks_wait_longer_for_the_slowest() -> None:
    """Each of the nine collectives waits for the slowest of four ranks."""
    found = predict(sharded(4), chip(), rates=replace(RATES, lag_seconds=1.0))
    assert found is not None
    assert found.by_kind["communication"] == pytest.approx(9 * 4)


def test_ranks_of_other_hosts_share_the_network() -> None:
    """Between hosts the network has 10 B/s instead of the link's 1,000 B/s."""
    within = predict(sharded(2), chip(link=1e3), rates=RATES, devices_per_host=2)
    across = predict(sharded(2), chip(link=1e3), rates=RATES, devices_per_host=1)
    assert within is not None
    assert across is not None
    assert across.by_kind["communication"] == pytest.approx(100 * within.by_kind["communication"])


@pytest.mark.parametrize(
    ("profile", "hardware", "rates", "reason"),
    [
        pytest.param(
            linear, None, RATES, "the chip or its memory bandwidth is unknown", id="no chip"
        ),
        pytest.param(
            linear,
            Hardware("other", {"bf16": 1.0}, 1.0),
            RATES,
            "does not cover the chip other, only round",
            id="another chip",
        ),
        pytest.param(
            lambda: linear(dtype=torch.float32),
            chip(),
            RATES,
            "does not cover matmuls in fp32",
            id="another dtype",
        ),
        pytest.param(
            lambda: linear(backward=False), chip(), RATES, "only runs forward", id="no training"
        ),
        pytest.param(
            linear,
            chip(),
            replace(RATES, host_seconds=1.0),
            "operators may take the host longer than running them",
            id="bound by launches",
        ),
    ],
)
def test_says_why_nothing_is_predicted(
    profile: Any, hardware: Hardware | None, rates: Rates, reason: str
) -> None:
    """Without a prediction, `why_not` returns the reason."""
    found = profile()
    assert predict(found, hardware, rates=rates) is None
    assert reason in (why_not(found, hardware, rates) or "")


def with_root(profile: lflops.Profile, **fields: Any) -> lflops.Profile:
    """Return the profile with changed fields of the root module."""
    modules = dict(profile.modules)
    modules[""] = replace(modules[""], **fields)
    return replace(profile, modules=modules)


def test_kinds_of_training_that_were_not_fitted_are_not_predicted() -> None:
    """Mixtures of experts, adapters and convolutions were not fitted.

    Experts are recognized by their class name, and adapters by the share of trainable parameters.
    """
    found = linear()
    parameters = found.modules[""].parameters
    assert parameters == 64 * 32
    experts = with_root(found, class_name="OlmoeSparseMoeBlock")
    assert why_not(experts, chip(), RATES) == "the prediction does not cover mixtures of experts"
    adapters = with_root(found, trainable_parameters=parameters // 2)
    assert "frozen weights" in (why_not(adapters, chip(), RATES) or "")
    image = torch.zeros(1, 3, 8, 8, dtype=torch.bfloat16)
    layer = nn.Conv2d(3, 4, 3, dtype=torch.bfloat16)
    convolution = lflops.estimate(layer, image, backward=True)
    assert why_not(convolution, chip(), RATES) == "the prediction does not cover convolutions"


def test_an_interval_widens_with_each_thing_that_was_not_fitted() -> None:
    """Each property of a run that was not fitted widens the interval.

    The factors are multiplied, and scale the logarithms of 3/4 and 3/2.
    """
    widening = Widening(source=2.0, chip=3.0, setting=1.5, fewest_parameters=1e6)
    rates = replace(RATES, widening=widening)
    found = predict(linear(), chip(peak=1e12), rates=rates)
    assert found is not None
    # The source is different, the run does not use FSDP2, and the model has only 2,048 parameters.
    width = 2.0 * 1.5 * 1.5
    assert found.low == pytest.approx(found.seconds * 0.75**width)
    assert found.high == pytest.approx(found.seconds * 1.5**width)
    assert len(found.widened) == 3
    families = {"round": replace(RATES.families["round"], not_fitted=("round",))}
    unknown_chip = predict(linear(), chip(peak=1e12), rates=replace(rates, families=families))
    assert unknown_chip is not None
    assert unknown_chip.low == pytest.approx(found.seconds * 0.75 ** (3.0 * width))
    sharded_step = predict(sharded(2), chip(peak=1.0, link=1e3), rates=rates)
    assert sharded_step is not None
    assert sharded_step.low == pytest.approx(sharded_step.seconds * 0.75 ** (2.0 * 1.5))


def test_compiled_code_is_not_predicted() -> None:
    """Compiled code moves fewer bytes than the operators of the eager program."""
    found = linear()
    compiled = replace(
        found, modules={name: replace(each, compiled=True) for name, each in found.modules.items()}
    )
    assert why_not(found, chip(), RATES) is None
    assert why_not(compiled, chip(), RATES) == "the prediction does not cover compiled code"


def test_the_shipped_rates_are_shares() -> None:
    """All fitted rates lie between 0 and the peak."""
    rates = fitted()
    shares = [rates.bandwidth, rates.link]
    for family in rates.families.values():
        shares += [family.product, family.attention]
    assert all(0 < share < 1 for share in shares)
    assert 0 < rates.low < 1 < rates.high
