"""Trainings on several ranks, each a real process.

Every rank is measured, and one profile tells of all; whatever becomes of a rank.
"""

import functools
import gzip
import json
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from pathlib import Path

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

UP, HEAD = ROWS * WIDTH * WIDE, ROWS * WIDTH * CLASSES
"""MACs of a batch; `down` has as many as `up`."""
PLACES = {
    "ddp": (2, 2, None, [{"data": 0}, {"data": 1}]),
    "tensors": (2, 1, 2, [{"data": 0, "tensor": 0}, {"data": 0, "tensor": 1}]),
    "shards": (2, 2, 1, [{"data": 0, "tensor": 0}, {"data": 1, "tensor": 0}]),
    "flat shards": (2, 2, None, [{"data": 0}, {"data": 1}]),
    "shards of tensors": (
        4,
        2,
        2,
        [{"data": data, "tensor": tensor} for data in (0, 1) for tensor in (0, 1)],
    ),
}
"""The sizes of world, data and tensor parallelism, and each rank's coordinates."""


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Processes that stay a group from training to training."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def results(two: Ranks) -> dict[str, list[Trained]]:
    """What each rank has, by the strategy."""
    with Ranks(4) as four:
        return {
            name: (four if data * tensor == 4 else two).run(trained, name)
            for name, (data, tensor, _) in STRATEGIES.items()
        }


def told(trainings: list[Trained]) -> list[Profile]:
    """What the main process tells, of a training from its first batch and of one whose window opens later; the others tell nothing."""
    main, *others = trainings
    assert [([], [])] * len(others) == [(each.first, each.later) for each in others]
    return [*main.first, *main.later]


def statuses(profile: Profile) -> list[str]:
    """Of the ranks."""
    return [rank.status for rank in profile.ranks]


def of_all(profile: Profile, ranks: int) -> bool:
    """Whether all ranks are in it, in full."""
    return ["ok"] * ranks == statuses(profile) and not profile.run.partial


def is_timed(profile: Profile) -> bool:
    """Whether the times of all layers and of all ranks' steps are known, and compared."""
    layers = [profile.modules[f"net.{name}"] for name in ("up", "down", "head")]
    assert {
        (f"net.{name}", phase)
        for name in ("up", "down", "head")
        for phase in ("forward", "backward")
    } <= {(stat.module, stat.phase) for stat in profile.rank_stats}
    return all(layer.forward.seconds and layer.backward.seconds for layer in layers) and all(
        rank.step for rank in profile.ranks
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_all_ranks_are_in_one_profile_at_their_places(
    name: str, results: dict[str, list[Trained]]
) -> None:
    """The places are those of the strategy's mesh, or of its sampler."""
    world, data, tensor, places = PLACES[name]
    first, later = told(results[name])
    for profile in (first, later):
        run = profile.run
        assert of_all(profile, world)
        assert (world, data, tensor) == (
            run.world_size,
            run.data_parallel_size,
            run.tensor_parallel_size,
        )
        assert places == [rank.coordinates for rank in profile.ranks]


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_rank_counts_its_own_work_in_its_first_batch_as_in_a_later_one(
    name: str, results: dict[str, list[Trained]]
) -> None:
    """Tensor parallelism halves the two layers and not the head; to shard changes nothing.

    The first layer's input needs no gradient.

    Of the whole model each rank knows as much as a single one would have done.
    """
    _, tensor, _ = STRATEGIES[name]
    spread = UP // tensor
    for profile in told(results[name]):
        assert {"net.up": spread, "net.down": spread, "net.head": HEAD} == macs(profile, "forward")
        assert {"net.up": spread, "net.down": 2 * spread, "net.head": 2 * HEAD} == macs(
            profile, "backward"
        )
        assert [2 * spread + HEAD + 3 * spread + 2 * HEAD] * len(profile.ranks) == [
            rank.macs for rank in profile.ranks
        ]
        whole = {"net.up": UP, "net.down": UP, "net.head": HEAD}
        assert whole == {name: profile.modules[name].forward.logical_macs for name in whole}
        assert 3 * (2 * UP + HEAD) - UP == sum(
            profile.modules[""].work(phase).logical_macs or 0 for phase in ("forward", "backward")
        )
        assert (
            2 * WIDTH * WIDE + WIDE + WIDTH + CLASSES * WIDTH + CLASSES
            == profile.modules[""].parameters
        )


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_rank_is_timed(name: str, results: dict[str, list[Trained]]) -> None:
    """In the window that has steps to time before it and behind it."""
    _, later = told(results[name])
    assert is_timed(later)


@pytest.mark.parametrize("name", STRATEGIES)
def test_weights_and_losses_are_those_of_a_training_that_nobody_watched(
    name: str, results: dict[str, list[Trained]]
) -> None:
    """To the bit, on each rank, and the random numbers to come."""
    assert [[[], []]] * len(results[name]) == [
        [differences(each.alone, facts) for facts in each.watched] for each in results[name]
    ]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_training_of_which_one_rank_was_meddled_with_is_another_one(
    name: str, results: dict[str, list[Trained]]
) -> None:
    """The check above can fail.

    A number drawn on the last rank changes its losses there, and by its gradients those of others.
    """
    _, tensor, _ = STRATEGIES[name]
    last = differences(results[name][-1].alone, results[name][-1].meddled)
    assert {"losses", "random numbers: torch"} <= set(last)
    if tensor == 1:
        assert "losses" in differences(results[name][0].alone, results[name][0].meddled)


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
    """Two products of the columns that a rank has, which are half of them."""
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
    """One GPU has all of it: each layer whole, whatever became of its parameters."""
    pytest.importorskip(needs)
    with Ranks(1) as one:
        ((profile,),) = one.run(on_a_device, strategy)
    assert {"net.up": UP, "net.down": UP, "net.head": HEAD} == macs(profile, "forward")
    assert {"net.up": UP, "net.down": 2 * UP, "net.head": 2 * HEAD} == macs(
        profile, "backward"
    )  # the input needs no gradient
    assert (
        2 * WIDTH * WIDE + WIDE + WIDTH + CLASSES * WIDTH + CLASSES
        == profile.modules[""].parameters
    )


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_ranks_that_lightning_starts_in_this_process(strategy: str, tmp_path: Path) -> None:
    """Nothing of theirs comes back but the file."""
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
    """In one folder, each with the number of its rank; the profile names both, and has the counts."""
    script = "import runpy; runpy.run_module('tests.support.trainer_ranks', run_name='__main__', alter_sys=True)"
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
    for file in (
        files
    ):  # rank 1 may outlive the process that the test started; a copy is the last that is written
        wait_for(copies / file.name if has_copies else file)
    for raw in folder.glob("*.raw*"):
        wait_for(raw, exists=False)
    assert sorted(folder.iterdir()) == sorted(files)
    assert [0, 1] == [
        json.loads(gzip.decompress(Path(file).read_bytes()))["distributedInfo"]["rank"]
        for file in profile.trace.files.values()
    ]
    takes_what_gloo_took(profile)
    if has_copies:
        shows_both_ranks(tmp_path, copies)


REDUCED = ("c10d::allreduce_", "gloo:all_reduce")
"""What launches an all-reduce, and what runs it."""


def takes_what_gloo_took(profile: Profile) -> None:
    """The seconds of the all-reduce are those of gloo's events in the first rank's trace, of two batches; the least is of either rank.

    Each is the first behind a launch. On a busy machine Kineto misses a launch now and then: nobody
    knows whose the event is then. Gloo's thread may end an event after the last step, when the
    recording is over: it has some end then, in the file another one than in memory.
    """
    assert profile.trace is not None
    least, took, seen = [], [], []
    for file in profile.trace.files.values():
        events = json.loads(gzip.decompress(Path(file).read_bytes()))["traceEvents"]
        launches, ran = (
            sorted((each["ts"], each["dur"]) for each in events if each["name"] == name)
            for name in REDUCED
        )
        behind = {next((each for each in ran if each[0] >= at), (0.0, 0.0)) for at, _ in launches}
        over = max(
            each["ts"] + each["dur"] for each in events if each["name"].startswith("ProfilerStep#")
        )
        least.append(sum(min(seconds, over - at) for at, seconds in behind) / 1e6 / 2)
        took.append(sum(seconds for _, seconds in behind) / 1e6 / 2)
        seen.append((launches, ran, over))
    (reduced,) = profile.communication
    assert reduced.seconds is not None
    assert reduced.least_seconds is not None
    assert least[0] * (1 - 1e-4) <= reduced.seconds <= took[0] * (1 + 1e-4), seen
    assert min(least) * (1 - 1e-4) <= reduced.least_seconds <= min(took) * (1 + 1e-4), seen
    assert reduced.exposed_seconds is not None
    assert 0 <= reduced.exposed_seconds <= took[0] * (1 + 1e-9)  # summed in another order


def shows_both_ranks(logs: Path, copies: Path) -> None:
    """Torch-tb-profiler takes the copies for one run, in which each rank has an all-reduce a batch."""
    (logs / "program").mkdir()
    with profiler_board(logs, logs / "program", runs=2) as board:
        run = str(copies.relative_to(logs))
        assert "Distributed" in board.json("views", run=run)
        workers = board.json("workers", run=run, view="Overview")
        assert ["0", "1"] == [worker.rpartition("_")[2] for worker in workers]
        collectives = board.json("distributed/commops", run=run, span="1")["data"]
        assert set(workers) == collectives.keys()
        assert {2} == {
            calls
            for told in collectives.values()
            for name, calls, *_ in told["rows"]
            if name == "gloo:all_reduce"
        }


def test_a_window_of_all_ranks_is_told_of_while_the_training_goes_on(two: Ranks) -> None:
    """Not first when all is over; the other rank tells nothing."""
    assert [1, 0] == two.run(told_meanwhile)


ENDINGS = {
    "raises": ("RuntimeError", IN_THE_WINDOW, ["failed", "failed"]),
    "is killed": ("RuntimeError", IN_THE_WINDOW, ["failed", "missing"]),
    "is killed at the end": (None, FEWER, ["ok", "missing"]),
    "cannot be watched": (None, FEW, ["ok", "failed"]),
}
"""What becomes of the second rank.

By which error the training of the first is left, behind how many steps, and what is told of both.
"""


@pytest.mark.parametrize(
    ("deed", "error", "steps", "expected"),
    [(deed, *rest) for deed, rest in ENDINGS.items()],
    ids=ENDINGS,
)
def test_a_training_of_which_a_rank_comes_to_grief_ends_as_it_would_have(
    deed: str, error: str, steps: int, expected: list[str]
) -> None:
    """With the same error behind the same step; and the profile says who is missing.

    A reduction that nobody joins is the last step's.
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
    """It has made all of its steps, and has nothing to tell."""
    first, second = two.run(ended, "cannot be watched", True)
    assert (None, FEW, []) == second
    assert ["ok", "failed"] == statuses(first.profiles[0])


@pytest.mark.parametrize(
    ("batches", "expected"), [((2, 5), "ok"), ((2, 1), "ok"), ((2, 0), "missing")]
)
def test_ranks_may_have_unequally_many_batches_to_be_validated_with(
    batches: tuple[int, int], expected: str, two: Ranks, tmp_path: Path
) -> None:
    """Three times so many: none waits for the other, who has none is missing there, and the training is what it would have been."""
    first, second = two.run(validated, batches, tmp_path)
    assert [] == second.profiles
    assert [[], []] == [differences(each.alone, each.watched) for each in (first, second)]
    profiles = {profile.run.stage: profile for profile in first.profiles}
    assert {"train": ["ok", "ok"], "validate": ["ok", expected]} == {
        stage: statuses(profile) for stage, profile in profiles.items()
    }
    assert {"train": False, "validate": expected != "ok"} == {
        stage: profile.run.partial for stage, profile in profiles.items()
    }
    for profile in first.profiles:
        assert {"net.up": UP, "net.down": UP, "net.head": HEAD} == macs(profile, "forward")


def test_where_the_first_rank_has_nothing_to_be_validated_with_nobody_waits_for_it(
    two: Ranks, tmp_path: Path
) -> None:
    """Of the validation it has nothing to tell, nor does anybody else."""
    first, second = two.run(validated, (0, 2), tmp_path)
    assert [[], []] == [differences(each.alone, each.watched) for each in (first, second)]
    assert [("train", ["ok", "ok"])] == [
        (profile.run.stage, statuses(profile)) for profile in first.profiles
    ]
