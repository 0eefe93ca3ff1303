"""Test training runs on several ranks, each of which is a real process.

Every rank is measured, and rank 0 gets one profile of all ranks, even if a rank fails or is killed.
"""

import functools
import gzip
import json
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import lflops
from lflops.profile.profile import Profile
from tests.support.lightning_runs import CLASSES, LIGHTNINGS_WARNINGS, ROWS, WIDTH, fit, watching
from tests.support.process_state import differences
from tests.support.processes import wait_for
from tests.support.profile_checks import macs
from tests.support.tensorboard_server import profiler_board
from tests.support.trainer_ranks import (
    BATCHES,
    FEW,
    FEWER,
    IN_THE_WINDOW,
    SOON,
    STRATEGIES,
    WIDE,
    Ranks,
    Spread,
    Trained,
    ended,
    mixed,
    on_a_device,
    told_meanwhile,
    trained,
    validated,
)
from tests.support.warm_python import WarmPython

pytestmark = LIGHTNINGS_WARNINGS

UP = ROWS * WIDTH * WIDE
"""MACs of the layer `up` in the forward of a batch. The layer `down` has as many."""
HEAD = ROWS * WIDTH * CLASSES
"""MACs of the layer `head` in the forward of a batch."""
PARAMETERS = 2 * WIDTH * WIDE + WIDE + WIDTH + CLASSES * WIDTH + CLASSES
"""Weights and biases of `up`, `down` and `head`."""
PLACES = {
    "ddp": (2, 2, None, [{"data": 0}, {"data": 1}]),
    "tensors": (2, 1, 2, [{"data": 0, "tensor": 0}, {"data": 0, "tensor": 1}]),
    "shards": (2, 2, 1, [{"data": 0, "tensor": 0}, {"data": 1, "tensor": 0}]),
    "flat shards": (2, 2, None, [{"data": 0}, {"data": 1}]),
    "shards of tensors": (
        4,
        2,
        2,
        [
            {"data": 0, "tensor": 0},
            {"data": 0, "tensor": 1},
            {"data": 1, "tensor": 0},
            {"data": 1, "tensor": 1},
        ],
    ),
}
"""By strategy: world size, data- and tensor-parallel sizes, and the coordinates of each rank."""


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Return two processes, which stay a process group for all training runs."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def results(two: Ranks) -> dict[str, list[Trained]]:
    """Train with each strategy, and return the results of all ranks by strategy."""
    trainings = {}
    with Ranks(4) as four:
        for name, (data, tensor, _) in STRATEGIES.items():
            ranks = four if data * tensor == 4 else two
            trainings[name] = ranks.run(trained, name)
    return trainings


def told(trainings: list[Trained]) -> list[Profile]:
    """Return the two profiles of rank 0. The other ranks must not have any.

    The first profile is from a run whose window opens with the first batch. The second one is from
    a run whose window opens later.
    """
    main, *others = trainings
    for each in others:
        assert [] == each.first
        assert [] == each.later
    return [*main.first, *main.later]


def statuses(profile: Profile) -> list[str]:
    """Return the status of each rank."""
    return [rank.status for rank in profile.ranks]


def of_all(profile: Profile, ranks: int) -> bool:
    """Return whether the profile is complete and has all ranks."""
    return ["ok"] * ranks == statuses(profile) and not profile.run.partial


def is_timed(profile: Profile) -> bool:
    """Return whether all layers, and the steps of all ranks, have times.

    The profile must also compare the layers between ranks.
    """
    compared = {(stat.module, stat.phase) for stat in profile.rank_stats}
    for name in ("net.up", "net.down", "net.head"):
        assert (name, "forward") in compared
        assert (name, "backward") in compared
    layers = [profile.modules[f"net.{name}"] for name in ("up", "down", "head")]
    has_layers = all(layer.forward.seconds and layer.backward.seconds for layer in layers)
    return has_layers and all(rank.step for rank in profile.ranks)


@pytest.mark.parametrize("name", STRATEGIES)
def test_all_ranks_are_in_one_profile_at_their_places(
    name: str, results: dict[str, list[Trained]]
) -> None:
    """The profile has all ranks, the parallel sizes, and the coordinates of each rank.

    These come from the device mesh of the strategy, or from its sampler.
    """
    world, data, tensor, places = PLACES[name]
    first, later = told(results[name])
    for profile in (first, later):
        run = profile.run
        assert of_all(profile, world)
        assert world == run.world_size
        assert data == run.data_parallel_size
        assert tensor == run.tensor_parallel_size
        assert places == [rank.coordinates for rank in profile.ranks]


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_rank_counts_its_own_work_in_its_first_batch_as_in_a_later_one(
    name: str, results: dict[str, list[Trained]]
) -> None:
    """Each rank counts the MACs that it runs, and the logical MACs are those of the whole model.

    Tensor parallelism divides the MACs of `up` and `down` between ranks, but not those of `head`.
    Sharding changes nothing. In backward, `up` has one matmul, because its input needs no gradient,
    and the other layers have two.
    """
    _, tensor, _ = STRATEGIES[name]
    spread = UP // tensor
    for profile in told(results[name]):
        forward = {"net.up": spread, "net.down": spread, "net.head": HEAD}
        assert forward == macs(profile, "forward")
        backward = {"net.up": spread, "net.down": 2 * spread, "net.head": 2 * HEAD}
        assert backward == macs(profile, "backward")
        each_rank = sum(forward.values()) + sum(backward.values())
        assert [each_rank] * len(profile.ranks) == [rank.macs for rank in profile.ranks]
        whole = {"net.up": UP, "net.down": UP, "net.head": HEAD}
        assert whole == {name: profile.modules[name].forward.logical_macs for name in whole}
        root = profile.modules[""]
        logical = (root.forward.logical_macs or 0) + (root.backward.logical_macs or 0)
        assert 3 * (2 * UP + HEAD) - UP == logical
        assert PARAMETERS == root.parameters


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_rank_is_timed(name: str, results: dict[str, list[Trained]]) -> None:
    """The profile of the later window has times of all layers and ranks.

    Only this window has other steps before and after it, which can be timed.
    """
    _, later = told(results[name])
    assert is_timed(later)


@pytest.mark.parametrize("name", STRATEGIES)
def test_weights_and_losses_are_those_of_a_training_that_nobody_watched(
    name: str, results: dict[str, list[Trained]]
) -> None:
    """On each rank, weights, losses and later random numbers equal those without the monitor."""
    for each in results[name]:
        assert [[], []] == [differences(each.alone, facts) for facts in each.watched]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_training_of_which_one_rank_was_meddled_with_is_another_one(
    name: str, results: dict[str, list[Trained]]
) -> None:
    """If one rank draws an additional random number, the test above would fail.

    The number changes the losses on the last rank. Its gradients change the losses of other ranks
    as well, unless these belong to the same tensor-parallel group.
    """
    _, tensor, _ = STRATEGIES[name]
    first = results[name][0]
    last = results[name][-1]
    assert {"losses", "random numbers: torch"} <= set(differences(last.alone, last.meddled))
    if tensor == 1:
        assert "losses" in differences(first.alone, first.meddled)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (True, (2 * ROWS * ROWS * WIDE, 2 * UP + HEAD + 2 * ROWS * ROWS * WIDE)),
        (False, (None, None)),
    ],
)
def test_a_count_in_one_piece_tells_what_ranks_do_not(
    told: bool, expected: tuple[int | None, int | None], two: Ranks
) -> None:
    """A profile passed as `logical` provides the MACs of the whole model that ranks cannot derive.

    The model multiplies the output of `up` with itself, in two matmuls. Each rank does this with
    its half of the columns, and tensor parallelism does not say that these are halves.
    """
    (profile,), _ = two.run(functools.partial(mixed, told=told))
    root = profile.modules[""].forward
    assert ROWS * ROWS * WIDE == root.self_macs
    assert expected == (root.self_logical_macs, root.logical_macs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("strategy", "needs"), [("fsdp", "torch"), ("deepspeed_stage_3", "deepspeed")]
)
@pytest.mark.usefixtures("cuda")
def test_strategies_that_are_for_gpus_alone(strategy: str, needs: str) -> None:
    """With FSDP or DeepSpeed on one GPU, MACs and parameters are those of the whole model.

    Both strategies replace the parameters of layers. In backward, `up` has one matmul, because its
    input needs no gradient.
    """
    pytest.importorskip(needs)
    with Ranks(1) as one:
        ((profile,),) = one.run(on_a_device, strategy)
    assert {"net.up": UP, "net.down": UP, "net.head": HEAD} == macs(profile, "forward")
    assert {"net.up": UP, "net.down": 2 * UP, "net.head": 2 * HEAD} == macs(profile, "backward")
    assert PARAMETERS == profile.modules[""].parameters


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_ranks_that_lightning_starts_in_this_process(strategy: str, tmp_path: Path) -> None:
    """If Lightning forks or spawns the ranks, the saved file has the complete profile of both.

    Only the file is checked, because the monitor in this process receives nothing from the ranks.
    """
    monitor = watching(schedule=SOON, dirpath=tmp_path)
    fit(Spread(), monitor, batches=2 * BATCHES, strategy=strategy, devices=2)
    (path,) = tmp_path.iterdir()
    profile = lflops.load(path)
    assert of_all(profile, 2)
    assert is_timed(profile)
    assert {"net.up": UP, "net.down": UP, "net.head": HEAD} == macs(profile, "forward")
    assert [{"data": 0}, {"data": 1}] == [rank.coordinates for rank in profile.ranks]


def test_ranks_that_lightning_starts_by_running_the_script_again_leave_a_trace_each(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """If Lightning starts rank 1 by running the script again, both ranks write a trace.

    The traces are in one folder, each with its rank. The profile lists both and has the counts.
    """
    script = (
        "import runpy; "
        "runpy.run_module('tests.support.trainer_ranks', run_name='__main__', alter_sys=True)"
    )
    ended = warm_python.run(script, tmp_path)
    assert 0 == ended.status, ended.err
    (path,) = tmp_path.glob("*.profile.json")
    profile = lflops.load(path)
    assert of_all(profile, 2)
    assert {"net.up": UP, "net.down": UP, "net.head": HEAD} == macs(profile, "forward")
    assert profile.trace is not None
    assert ["0", "1"] == list(profile.trace.files)
    (folder,) = (tmp_path / "lflops_traces").glob("train-*")
    copies = folder.with_name(f"compat-{folder.name}")
    has_copies = find_spec("torch_tb_profiler") is not None
    files = [Path(path) for path in profile.trace.files.values()]
    # Rank 1 may outlive the process that the test started. It writes the copy last.
    for file in files:
        wait_for(copies / file.name if has_copies else file)
    for raw in folder.glob("*.raw*"):
        wait_for(raw, exists=False)
    assert sorted(folder.iterdir()) == sorted(files)
    traces = [json.loads(gzip.decompress(file.read_bytes())) for file in files]
    assert [0, 1] == [trace["distributedInfo"]["rank"] for trace in traces]
    takes_what_gloo_took(profile)
    if has_copies:
        shows_both_ranks(tmp_path, copies)


LAUNCH = "c10d::allreduce_"
"""Name of the event in a trace that launches an all-reduce."""
REDUCE = "gloo:all_reduce"
"""Name of the event in which gloo runs an all-reduce."""


def spans(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Return beginning and duration, in µs, of the events with a name, in order."""
    return sorted((each["ts"], each["dur"]) for each in events if each["name"] == name)


def takes_what_gloo_took(profile: Profile) -> None:
    """Check the seconds of the all-reduce in a batch against gloo's events in the traces.

    `seconds` is the mean of two batches in the trace of rank 0, and `least_seconds` is the smaller
    mean of both ranks. Each launch belongs to the first event of gloo after it. Events without a
    launch are left out: on a busy machine, Kineto sometimes misses a launch. Gloo's thread may end
    an event after the recording has ended. The end of such an event differs between the file and
    the profile, so the sum may lie between the two values `least` and `took`.
    """
    assert profile.trace is not None
    # in seconds per batch, by rank: up to the end of the last step, and in full
    least = []
    took = []
    # printed if an assertion fails
    seen = []
    for file in profile.trace.files.values():
        events = json.loads(gzip.decompress(Path(file).read_bytes()))["traceEvents"]
        launches = spans(events, LAUNCH)
        ran = spans(events, REDUCE)
        behind = set()
        for launched, _ in launches:
            after = [each for each in ran if each[0] >= launched]
            behind.add(after[0] if after else (0.0, 0.0))
        steps = [each for each in events if each["name"].startswith("ProfilerStep#")]
        over = max(each["ts"] + each["dur"] for each in steps)
        least.append(sum(min(seconds, over - at) for at, seconds in behind) / 1e6 / 2)
        took.append(sum(seconds for _, seconds in behind) / 1e6 / 2)
        seen.append((launches, ran, over))
    (reduced,) = profile.communication
    assert reduced.seconds is not None
    assert reduced.least_seconds is not None
    assert least[0] * (1 - 1e-4) <= reduced.seconds <= took[0] * (1 + 1e-4), seen
    assert min(least) * (1 - 1e-4) <= reduced.least_seconds <= min(took) * (1 + 1e-4), seen
    assert reduced.exposed_seconds is not None
    # The tolerance covers rounding: the profile adds up the events in another order.
    assert 0 <= reduced.exposed_seconds <= took[0] * (1 + 1e-9)


def shows_both_ranks(logs: Path, copies: Path) -> None:
    """Check that torch-tb-profiler shows the copies of the traces as one run with two ranks.

    In the two batches, each rank has 2 all-reduces.
    """
    (logs / "program").mkdir()
    with profiler_board(logs, logs / "program", runs=2) as board:
        run = str(copies.relative_to(logs))
        assert "Distributed" in board.json("views", run=run)
        workers = board.json("workers", run=run, view="Overview")
        assert ["0", "1"] == [worker.rpartition("_")[2] for worker in workers]
        collectives = board.json("distributed/commops", run=run, span="1")["data"]
        assert set(workers) == collectives.keys()
        all_calls = set()
        for worker in collectives.values():
            for name, calls, *_ in worker["rows"]:
                if name == REDUCE:
                    all_calls.add(calls)
        assert {2} == all_calls


def test_a_window_of_all_ranks_is_told_of_while_the_training_goes_on(two: Ranks) -> None:
    """Rank 0 has the profile of a window before training ends, and rank 1 has none."""
    assert [1, 0] == two.run(told_meanwhile)


ENDINGS = {
    "raises": ("RuntimeError", IN_THE_WINDOW, ["failed", "failed"]),
    "is killed": ("RuntimeError", IN_THE_WINDOW, ["failed", "missing"]),
    "is killed at the end": (None, FEWER, ["ok", "missing"]),
    "cannot be watched": (None, FEW, ["ok", "failed"]),
}
"""For each fate of rank 1: the error that ends training on rank 0, its steps, and both statuses."""


@pytest.mark.parametrize(
    ("deed", "error", "steps", "expected"),
    [(deed, *rest) for deed, rest in ENDINGS.items()],
    ids=ENDINGS,
)
def test_a_training_of_which_a_rank_comes_to_grief_ends_as_it_would_have(
    deed: str, error: str, steps: int, expected: list[str]
) -> None:
    """If rank 1 fails, rank 0 ends with the same error after the same step as without the monitor.

    The profile is partial and has the status of each rank; ranks without a report are missing. With
    an error, rank 0 computes one more loss: it fails in the reduction that rank 1 does not join.
    """
    with Ranks(2) as ranks:
        watched, other = ranks.outcomes(ended, deed, True)
    with Ranks(2) as ranks:
        plain, _ = ranks.outcomes(ended, deed, False)
    reached = steps + (error is not None)
    assert (error, reached) == (plain.error, plain.losses) == (watched.error, watched.losses)
    assert isinstance(other, BrokenProcessPool) == (deed != "cannot be watched")
    (profile,) = watched.profiles
    assert (expected, True) == (statuses(profile), profile.run.partial)
    assert [] == [note for note in profile.notes if note.code == "gather_failed"]
    absent = [note.subject for note in profile.notes if note.code == "ranks_missing"]
    assert ([] if deed == "raises" else ["1"]) == absent
    assert {"net.up": UP, "net.down": UP, "net.head": HEAD} == macs(profile, "forward")


def test_a_rank_whose_monitor_fails_goes_on_with_its_training(two: Ranks) -> None:
    """If the monitor of rank 1 fails, the rank still runs all its steps, and has no profile."""
    first, second = two.run(ended, "cannot be watched", True)
    assert (None, FEW, []) == second
    assert ["ok", "failed"] == statuses(first.profiles[0])


@pytest.mark.parametrize(
    ("batches", "expected"), [((2, 5), "ok"), ((2, 1), "ok"), ((2, 0), "missing")]
)
def test_ranks_may_have_unequally_many_batches_to_be_validated_with(
    batches: tuple[int, int], expected: str, two: Ranks, tmp_path: Path
) -> None:
    """Ranks with different numbers of validation batches do not wait for each other.

    A rank without any is missing in the profile of validation. The training results are the same as
    without the monitor. The run validates three times.
    """
    first, second = two.run(validated, batches, tmp_path)
    assert [] == second.profiles
    assert [[], []] == [differences(each.alone, each.watched) for each in (first, second)]
    profiles = {profile.run.stage: profile for profile in first.profiles}
    assert {"train", "validate"} == profiles.keys()
    training = profiles["train"]
    assert ["ok", "ok"] == statuses(training)
    assert not training.run.partial
    validation = profiles["validate"]
    assert ["ok", expected] == statuses(validation)
    assert (expected != "ok") == validation.run.partial
    for profile in first.profiles:
        assert {"net.up": UP, "net.down": UP, "net.head": HEAD} == macs(profile, "forward")


def test_where_the_first_rank_has_nothing_to_be_validated_with_nobody_waits_for_it(
    two: Ranks, tmp_path: Path
) -> None:
    """If rank 0 has no validation batches, there is no profile of validation, and no rank waits."""
    first, second = two.run(validated, (0, 2), tmp_path)
    assert [[], []] == [differences(each.alone, each.watched) for each in (first, second)]
    assert [("train", ["ok", "ok"])] == [
        (profile.run.stage, statuses(profile)) for profile in first.profiles
    ]
