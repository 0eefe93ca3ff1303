"""Test that lflops detects training loops that do not call it, if `LFLOPS` is set.

The loops are scripts that run in separate processes. Their ledgers must have the right steps,
phases and validations, and the loops must train as without lflops. With the argument `unwatched`, a
script runs without lflops.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import lflops
from lflops.integrations.auto_detect.entry import FINDER, settings_line, step_ends
from lflops.integrations.auto_detect.finder import modules_of
from lflops.ledger.ledger_file import load_run
from tests.support.warm_python import Ended, Script, WarmPython

ASKED = """
import os, sys
folder = sys.argv[1]
os.environ["LFLOPS"] = f"dirpath={folder},hardware=none,html=false,trace=false"
from lflops.integrations.auto_detect.entry import watch
if "unwatched" not in sys.argv:
    watch()  # torch calls it as it is imported
import torch
from torch import nn
from torch.utils.data import DataLoader
torch.manual_seed(0)
torch.set_num_threads(1)
"""
"""The beginning of each script. It writes the ledger to the folder that is its first argument."""

MODEL = """
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

PLAIN = f"""{ASKED}{MODEL}
loader, validated = (DataLoader(torch.randn(320, 64), batch_size=32) for _ in range(2))
for epoch in range(4):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for batch in validated:
            model(batch)
print(*(each.double().sum().item().hex() for each in model.parameters()))
"""


def ended(python: WarmPython, code: str, *arguments: object) -> Ended:
    """Run a script, and check that it ends without an error."""
    result = python.run(code, *arguments)
    assert 0 == result.status, result.err
    return result


def accumulating(batches: int) -> str:
    """Return a script that makes an optimizer step after each `batches` batches of 32 samples."""
    asked = ASKED.replace("hardware=none", "wait=4,hardware=none")
    return f"""{asked}{MODEL}
loader = DataLoader(torch.randn(32 * 40 * {batches}, 64), batch_size=32)
for number, batch in enumerate(loader, 1):
    model(batch).square().mean().backward()
    if number % {batches} == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("batches", "samples"), [(1, 32), (4, None)])
def test_the_samples_of_a_step_with_several_batches_are_unknown(
    batches: int, samples: int | None, tmp_path: Path, warm_python: WarmPython
) -> None:
    """The last of four batches is not the whole input of a step. With one batch, it is."""
    ended(warm_python, accumulating(batches), tmp_path)
    (path,) = tmp_path.rglob("*.profile.json")
    profile = lflops.load(path)
    assert samples == profile.run.samples_per_step
    counted = sum(count.macs for count in profile.op_counts if count.phase == "forward")
    assert batches * 32 * (64 * 64 + 64 * 4) == counted


def test_statistics_of_the_weights_are_no_forward_pass(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """A detected step begins after the optimizer's step, and so with what the loop does then.

    The means of two weights and two biases need gradients and belong to no module, like a loss.
    """
    statistics = "\n    means = [parameter.mean() for parameter in model.parameters()]"

    def forward_calls(code: str, name: str) -> int:
        folder = tmp_path / name
        folder.mkdir()
        ended(warm_python, code, folder)
        (path,) = folder.rglob("*.profile.json")
        return lflops.load(path).modules[""].forward.calls

    without = accumulating(1)
    assert forward_calls(without, "without") == forward_calls(without + statistics, "with")


def test_a_plain_loop_has_its_phases_steps_and_validations(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """The ledger has all 40 steps, every category of the loop, and parts that add up to the total.

    The loop is detected during its first two steps. They are counted, but without a duration.
    """
    ended(warm_python, PLAIN, tmp_path)
    ledger = load_run(tmp_path)
    phases = {
        "training/data",
        "training/forward",
        "training/backward",
        "training/optimizer",
        "training/other",
    }
    others = {"start_up", "validation", "between_epochs", "after_run"}
    assert phases | others <= ledger.seconds.keys()
    start = ledger.starts[0]
    assert (40, 0, "finished") == (ledger.steps, start.first_step, start.ended)
    assert ledger.total == pytest.approx(sum(ledger.seconds.values()), abs=1e-6)
    assert min(ledger.seconds.values()) >= 0


def test_its_weights_are_those_without(tmp_path: Path, warm_python: WarmPython) -> None:
    """The script prints the same sums of weights, to the bit, as without lflops.

    Only the first run writes a file, its ledger.
    """
    watched = ended(warm_python, PLAIN, tmp_path).out
    unwatched = ended(warm_python, PLAIN, tmp_path, "unwatched").out
    assert unwatched == watched
    assert 1 == len(list(tmp_path.iterdir()))


WINDOW = f"""{ASKED}{MODEL}
from torch.optim.optimizer import register_optimizer_step_post_hook
calls = []
register_optimizer_step_post_hook(lambda *_: calls.append(1))  # behind ours, and before those of the window
for step in range(40):
    if step == 10:
        from lflops.monitoring.run import OPEN
        (run,) = OPEN
        run.request_window()
    model(torch.ones(32, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(len(calls))
"""


def test_a_window_can_be_asked_for(tmp_path: Path, warm_python: WarmPython) -> None:
    """A requested window of an auto-detected loop writes a profile with the right MACs.

    Forward has 32 rows through 64 × 64 and 64 × 4 weights. Backward has two matmuls for each layer,
    except that the data has no gradient. The optimizer hook of the script still runs in all 40
    steps.
    """
    assert "40" == ended(warm_python, WINDOW, tmp_path).out.splitlines()[-1]
    (path,) = tmp_path.glob("*.profile.json")
    profile = lflops.load(path)
    forward = 32 * (64 * 64 + 64 * 4)
    assert forward == profile.total(phase="forward")
    assert 2 * forward - 32 * 64 * 64 == profile.total(phase="backward")


PADDED = f"""{ASKED}
class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 8, padding_idx=0)
        self.head = nn.Linear(8, 4)
    def forward(self, ids, lengths):
        return self.head(self.embedding(ids)).sum(1)
def collate(rows):
    ids = torch.randint(1, 100, (len(rows), 20))
    ids[:, 12:] = 0
    return ids, torch.full((len(rows),), 12)
model = Reader()
optimizer = torch.optim.Adam(model.parameters())
for step, (ids, lengths) in enumerate(DataLoader(range(320), batch_size=8, collate_fn=collate)):
    if step == 10:
        from lflops.monitoring.run import OPEN
        (run,) = OPEN
        run.request_window()
    model(ids, lengths).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_tokens_and_the_padding_of_a_detected_loop_are_known(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """A batch has 8 rows of 20 ids, of which the last 8 are padding: 40 %.

    In a detected loop, the batch is known only at the end of its step.
    """
    ended(warm_python, PADDED, tmp_path)
    (path,) = tmp_path.glob("*.profile.json")
    profile = lflops.load(path)
    assert 160 == profile.run.tokens_per_step
    (note,) = (note for note in profile.notes if note.code == "padding")
    assert 0.4 == note.values["share"]


METHOD = WINDOW.replace("model(torch.ones(32, 64))", "agent.act(torch.ones(32, 64))").replace(
    "from torch.optim.optimizer import",
    """
class Agent(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def act(self, x):
        return self.inner(x)
agent = Agent(model)
from torch.optim.optimizer import""",
)


def test_a_model_that_is_called_by_a_method_keeps_its_names(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """The loop calls `agent.act`, so only the inner module is called. The table shows the agent.

    Forward has 32 rows through 64 × 64 and 64 × 4 weights.
    """
    ended(warm_python, METHOD, tmp_path)
    (path,) = tmp_path.glob("*.profile.json")
    profile = lflops.load(path)
    assert "Agent" == profile.modules[""].class_name
    assert 32 * 64 * 64 == profile.modules["inner.0"].forward.macs
    assert 32 * (64 * 64 + 64 * 4) == profile.total(phase="forward")
    assert all(step.phases.get("forward") for step in profile.steps if step.is_unprofiled)


OTHERS = {
    "a model within a class that is never called": """
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    def act(self, x):
        return self.model(x)
agent = Agent()
optimizer = torch.optim.Adam(agent.parameters())
for _ in range(20):
    agent.act(torch.ones(2, 64)).sum().backward()
    optimizer.step()
""",
    "two models with an optimizer each": """
first, second = nn.Linear(8, 8), nn.Linear(8, 8)
optimizers = [torch.optim.Adam(each.parameters()) for each in (first, second)]
for _ in range(20):
    for optimizer in optimizers:
        second(first(torch.ones(2, 8))).sum().backward()
        optimizer.step()
""",
    "a compiled model": """
model = torch.compile(nn.Linear(8, 8), backend="aot_eager")
optimizer = torch.optim.Adam(model.parameters())
for step in range(20):
    model(torch.ones(2 if step < 10 else 3, 8)).sum().backward()
    optimizer.step()
from torch._dynamo.utils import counters
assert counters["stats"]["unique_graphs"] == 2, counters
""",
    "gradients of several batches": """
model = nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters())
for step in range(60):
    model(torch.ones(2, 8)).sum().backward()
    if step % 3 == 2:
        optimizer.step()
""",
}


@pytest.mark.parametrize("loop", OTHERS)
def test_loops_of_other_kinds_are_found(loop: str, tmp_path: Path, warm_python: WarmPython) -> None:
    """The ledger of each unusual loop has 20 steps and all their phases.

    Only the loop with a compiled model has time for compilation.
    """
    ended(warm_python, ASKED + OTHERS[loop], tmp_path)
    ledger = load_run(tmp_path)
    assert 20 == ledger.steps
    assert {"training/forward", "training/backward", "training/optimizer"} <= ledger.seconds.keys()
    assert ("compilation" in ledger.seconds) == ("compiled" in loop)


METHODS = """
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 4))
    def loss(self, x):
        return (x @ self.weight).square().mean()
model = Own()
loss = model.loss
"""
"""A loop that calls only a method of its model, so hooks do not see the forward pass."""

COMPILED_IN_PLACE = """
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
model.compile(backend="aot_eager")
def loss(x):
    return model(x).square().mean()
"""

CALLED = COMPILED_IN_PLACE.replace("model.compile", "(lambda **_: None)")
"""A loop that calls its model, which is not compiled."""

CLOCKED = f"""
import time
class Clock:
    now = 0
    def read(self):
        self.now += 1
        return self.now
clock = Clock()
time.perf_counter_ns = clock.read
{ASKED}"""
"""The beginning of a script on whose clock only `clock.now += nanoseconds` takes time."""

LOADERS = """
def batches():
    return DataLoader(torch.randn(320, 64), batch_size=32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
validated = batches()
def step(batch):
    optimizer.zero_grad()
    loss(batch).backward()
    optimizer.step()
def validate():
    model.eval()
    with torch.no_grad():
        for batch in validated:
            loss(batch)
            clock.now += 10**8
    model.train()
"""
"""A training step on 32 samples, and a validation of ten batches, which takes 1 second."""

BETWEEN_EPOCHS = """
loader = batches()
for epoch in range(4):
    for batch in loader:
        step(batch)
    validate()
"""

IN_A_STEP = """
for number, batch in enumerate(DataLoader(torch.randn(1280, 64), batch_size=32)):
    if number % 10 == 5:
        validate()
    step(batch)
"""

WITHOUT_A_LOADER = """
for number in range(40):
    step(torch.randn(32, 64))
    if number % 10 == 9:
        validate()
"""

SCORED_BEFORE = """
loader = batches()
for epoch in range(4):
    for batch in loader:
        step(batch)
    with torch.no_grad():
        loss(batch)
    validate()
"""


@pytest.mark.parametrize(
    ("model", "loop", "detected"),
    [
        pytest.param(METHODS, BETWEEN_EPOCHS, 4, id="methods"),
        pytest.param(METHODS, IN_A_STEP, 4, id="methods, in a step"),
        # The first validation is missed, because its loader is the first one that fetches a batch:
        # lflops cannot know that it is not the training loader.
        pytest.param(METHODS, WITHOUT_A_LOADER, 3, id="methods, without a loader"),
        pytest.param(METHODS, SCORED_BEFORE, 4, id="methods, scored before"),
        pytest.param(COMPILED_IN_PLACE, BETWEEN_EPOCHS, 4, id="compiled in place"),
        pytest.param(CALLED, IN_A_STEP, 4, id="calls, in a step"),
        pytest.param(CALLED, WITHOUT_A_LOADER, 4, id="calls, without a loader"),
        pytest.param(CALLED, SCORED_BEFORE, 4, id="calls, scored before"),
    ],
)
def test_validations_are_seen_in_loops_of_all_kinds(
    model: str, loop: str, detected: int, tmp_path: Path, warm_python: WarmPython
) -> None:
    """`detected` of the 4 validations are detected, and each of them takes 1 second.

    A validation that is not detected makes the next step slow.
    """
    ended(warm_python, f"{CLOCKED}{model}{LOADERS}{loop}", tmp_path)
    ledger = load_run(tmp_path)
    assert 40 == ledger.steps
    assert detected == pytest.approx(ledger.by_group()["validation"], abs=0.01)
    missed = [each for each in ledger.slow_steps if each.cause != "validation"]
    assert 4 - detected >= len(missed)


ROLLOUTS = f"""{ASKED}{CALLED}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(10):
    model.train("trains" in sys.argv)
    with torch.no_grad():
        for _ in range(300):
            loss(torch.randn(1, 64))
    model.train()
    for _ in range(4):
        optimizer.zero_grad()
        loss(torch.randn(32, 64)).backward()
        optimizer.step()
"""


@pytest.mark.parametrize("mode", ["evaluates", "trains"])
def test_rollouts_are_no_validation(mode: str, tmp_path: Path, warm_python: WarmPython) -> None:
    """Calls without gradients are inference, if no data loader provides their batches.

    In reinforcement learning, a policy acts like this, in eval mode or in training mode.
    """
    ended(warm_python, ROLLOUTS, tmp_path, mode)
    spent = load_run(tmp_path).by_group()
    assert "validation" not in spent
    assert spent["inference"] > 0


OFF_POLICY = f"""{ASKED}{CALLED}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(40):
    if step == 5:
        from lflops.monitoring.run import OPEN
        (run,) = OPEN
        run.request_window()
    model.eval()
    with torch.no_grad():
        loss(torch.randn(1, 64))
    model.train()
    optimizer.zero_grad()
    loss(torch.randn(32, 64)).backward()
    optimizer.step()
"""


def test_steps_that_each_follow_a_rollout_are_timed(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """A rollout before each step does not mark the step as disturbed by a validation.

    Otherwise such a loop would have no unprofiled steps, because a rollout precedes all of them.
    """
    ended(warm_python, OFF_POLICY, tmp_path)
    (path,) = tmp_path.glob("*.profile.json")
    profile = lflops.load(path)
    timed = [step for step in profile.steps if step.kind == "unprofiled"]
    assert timed
    assert not [step for step in timed if "validation" in step.marks]


LOADED = f"""{ASKED}{MODEL}
from lflops.monitoring.run import MonitoredRun
MonitoredRun.move_time = lambda self, nanoseconds, *which: print(*which, nanoseconds > 0)
loader, validated = (DataLoader(torch.randn(320, 64), batch_size=32) for _ in range(2))
for epoch in range(3):
    model.train()
    for batch in loader:
        model(batch).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.set_grad_enabled(sys.argv[2] == "with"):
        for batch in validated:
            with torch.no_grad():
                model(batch)
"""


@pytest.mark.parametrize("gradients", ["with", "without"])
def test_a_validation_s_first_batch_is_its_own(
    gradients: str, tmp_path: Path, warm_python: WarmPython
) -> None:
    """The fetch of a validation's first batch is moved from the data wait to the validation.

    During the fetch, lflops cannot know that a validation begins. It knows when the model is then
    called without gradients. The script prints each move of time, one for each of 3 validations.
    """
    moves = ended(warm_python, LOADED, tmp_path, gradients).out.splitlines()
    assert ["data validation True"] * 3 == moves


SAMPLED = f"""{CLOCKED}{MODEL}
for epoch in range(5):
    for batch in DataLoader(torch.randn(320, 64), batch_size=32):
        model(batch).square().mean().backward()
        optimizer.step()
    with torch.no_grad():  # in train mode
        for _ in range(10):
            model(torch.randn(320, 64))
            clock.now += 10**8
"""


def test_a_sample_after_an_epoch_is_between_epochs(tmp_path: Path, warm_python: WarmPython) -> None:
    """Calls without gradients after an epoch belong to `between_epochs`, not to the next step.

    On the clock of the script, the calls after each of the five epochs take 1 second.
    """
    ended(warm_python, SAMPLED, tmp_path)
    spent = load_run(tmp_path).by_group()
    assert 5 == pytest.approx(spent["between_epochs"] + spent["after_run"], abs=0.01)


def test_what_follows_a_validation_is_no_part_of_it(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """A validation ends when its loader ends; the time after it is `between_epochs`.

    On the clock of the script, a validation takes 1 second, and the work after it, like a large
    checkpoint, takes 10 seconds.
    """
    code = f"""{CLOCKED}{CALLED}{LOADERS}
for epoch in range(4):
    for batch in batches():
        step(batch)
    validate()
    clock.now += 10**10
"""
    ended(warm_python, code, tmp_path)
    spent = load_run(tmp_path).by_group()
    assert 4 == pytest.approx(spent["validation"], abs=0.01)
    assert 40 == pytest.approx(spent["between_epochs"] + spent["after_run"], abs=0.01)


def test_predictions_after_a_validation_are_inference(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """After the last validation, the script predicts whole tensors, without a data loader.

    In the twin, it predicts nothing.
    """
    code = f"""{CLOCKED}{CALLED}{LOADERS}
for epoch in range(4):
    for batch in batches():
        step(batch)
    validate()
model.eval()
with torch.no_grad():
    for _ in range(int(sys.argv[2])):
        model(torch.ones(32, 64))
        clock.now += 10**9
"""
    for calls, inference in (("3", 3), ("0", 0)):
        folder = tmp_path / calls
        folder.mkdir()
        ended(warm_python, code, folder, calls)
        spent = load_run(folder).by_group()
        assert 4 == pytest.approx(spent["validation"], abs=0.01)
        assert inference == pytest.approx(spent.get("inference", 0.0), abs=0.01)


def test_a_batch_that_was_fetched_ahead_belongs_to_the_validation(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """The loop fetches each batch one call ahead, so the loader ends before the last call."""
    code = f"""{ASKED}{MODEL}
def ahead(loader):
    batches = iter(loader)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch
loader, validated = (DataLoader(torch.randn(320, 64), batch_size=32) for _ in range(2))
for epoch in range(3):
    model.train()
    for batch in loader:
        model(batch).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for batch in ahead(validated):
            model(batch)
"""
    ended(warm_python, code, tmp_path)
    spent = load_run(tmp_path).by_group()
    assert spent["validation"] > 0
    assert "inference" not in spent


def test_saving_is_a_category_of_its_own(tmp_path: Path, warm_python: WarmPython) -> None:
    """The script saves 40 MB after each step, with nothing else outside the phases."""
    code = f"""{ASKED}
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
large = torch.zeros(10_000_000)
for _ in range(12):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(large, sys.argv[1] + "/large.pt")
"""
    ended(warm_python, code, tmp_path)
    spent = load_run(tmp_path).seconds
    assert spent["checkpoint_save"] > spent["training/other"]


RELEASED = f"""{ASKED}
import gc, weakref
gc.disable()
def train():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.ones(64, 8), batch_size=4)
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()
    return weakref.ref(model), weakref.ref(loader)
print([each() is None for _ in range(2) for each in train()])
"""


def test_nothing_keeps_a_model_or_a_loader_alive(tmp_path: Path, warm_python: WarmPython) -> None:
    """Models and loaders are freed with their last reference, as in a script without lflops.

    The script disables the garbage collector. torch itself may keep the first model and loader, so
    only the second ones must be freed in any case. Each loop has its own ledger, because the first
    optimizer no longer exists when the second one makes a step.
    """
    watched = ended(warm_python, RELEASED, tmp_path).out.strip()
    unwatched = ended(warm_python, RELEASED, tmp_path, "unwatched").out.strip()
    assert watched == unwatched
    assert watched.endswith("True, True]")
    assert 2 == len(list(tmp_path.iterdir()))


MONITORED = f"""{ASKED}{MODEL}
import lflops
from tests.support import stack_sampling
stack_sampling.turn_off()
def step():
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
for _ in range(int(sys.argv[2])):
    step()
with lflops.monitor(model, optimizer, hardware=None, trace=False, log=lambda _: None) as monitor:
    for _ in range(20):
        with monitor.step(torch.ones(2, 64)):
            step()
    from lflops.monitoring.run import OPEN
    print(len(OPEN), len(monitor.profiles), "lflops.integrations.auto_detect.finder" in sys.modules)
"""


@pytest.mark.parametrize(("before", "found"), [(0, False), (10, True)])
def test_a_script_that_watches_itself_is_left_alone(
    before: int, found: bool, tmp_path: Path, warm_python: WarmPython
) -> None:
    """If a script uses `lflops.monitor`, auto-detection does not start or ends at that moment.

    The script prints the number of open runs, its number of profiles, and whether the code for
    auto-detection was loaded.
    """
    assert f"1 1 {found}" == ended(warm_python, MONITORED, tmp_path, before).out.strip()
    assert found == bool(list(tmp_path.iterdir()))


BETWEEN = f"""{ASKED}{MODEL}
import lflops
probe = nn.Linear(2, 2)
for step in range(60):
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    if step % 20 == 10:
        with lflops.monitor(probe, ledger=False, hardware=None, trace=False, count=False, log=lambda _: None) as monitor:
            with monitor.step(torch.ones(2, 2)):
                probe(torch.ones(2, 2))
"""


def test_a_monitor_between_two_steps_leaves_the_loop_watched(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """A monitor that opens and closes between two steps does not end the auto-detection.

    It is closed before the next step ends, so it cannot monitor this loop.
    """
    ended(warm_python, BETWEEN, tmp_path)
    assert 60 == load_run(tmp_path).steps
    assert 1 == len(list(tmp_path.iterdir()))


GARBAGE = f"""{ASKED}{MODEL}
import gc
from lflops.ledger import writer
data = [[torch.ones(2, 64), torch.ones(2, 4)]] * 2100
loader = iter(DataLoader(data, batch_size=None))
def steps(number):
    for _ in range(number):
        inputs, wanted = next(loader)
        (model(inputs) - wanted).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
if "unwatched" not in sys.argv:
    writer.LOOK = writer.WRITE = 1e9  # no thread reads
steps(100)
gc.disable()
gc.collect()
before = len(gc.get_objects())
steps(2000)
print(len(gc.get_objects()) - before)
"""


def test_steps_make_no_garbage_that_python_collects(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """Notes about 2,000 steps contain no objects that Python's garbage collector tracks.

    The notes accumulate until a thread reads them, and the collector would visit all of them. The
    scripts print the growth of the number of tracked objects.
    """
    watched = int(ended(warm_python, GARBAGE, tmp_path).out)
    unwatched = int(ended(warm_python, GARBAGE, tmp_path, "unwatched").out)
    assert abs(watched - unwatched) < 20


INTERRUPTED = f"""{ASKED}{MODEL}
from lflops.integrations.auto_detect import detected_phases
are_on, interrupts = detected_phases.is_grad_enabled, []
def interrupted():
    if len(interrupts) == 100:
        interrupts.append(1)
        raise KeyboardInterrupt
    interrupts.append(1)
    return are_on()
detected_phases.is_grad_enabled = interrupted
for _ in range(200):
    try:
        for _ in range(20):
            model(torch.ones(512, 64))
        model(torch.ones(2, 64)).sum().backward()
    except KeyboardInterrupt:
        print("interrupted")
    optimizer.step()
from torch._dynamo.callback import callback_handler
print(len(callback_handler.start_callbacks), len(callback_handler.end_callbacks), len(model._forward_pre_hooks))
"""


def test_an_interrupt_in_a_hook_takes_all_off_and_keeps_what_was_noted(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """If a `KeyboardInterrupt` occurs inside a hook, all hooks are removed and the notes are kept.

    The interrupt ends the monitoring after 100 calls of the model, 21 in each step. The ledger has
    the steps before it.
    """
    assert ["interrupted", "0 0 0"] == ended(warm_python, INTERRUPTED, tmp_path).out.splitlines()
    ledger = load_run(tmp_path)
    forward = ledger.seconds["training/forward"]
    assert 0 < forward
    # the 20 large forward passes of a step take nearly all of its time
    assert forward > ledger.seconds["training/other"]
    assert 2 < ledger.steps < 10


RANKS = f"""{ASKED}{MODEL}
from torch import distributed
rank = int(sys.argv[2])
distributed.init_process_group("gloo", init_method=f"file://{{folder}}/store", rank=rank, world_size=2)
parallel = nn.parallel.DistributedDataParallel(model)
for _ in range(20):
    parallel(torch.ones(2, 64)).sum().backward()
    optimizer.step()
del parallel  # before its group: in torch 2.13 the other order can hang, as gloo's thread waits for Python's lock
distributed.destroy_process_group()
"""


def test_each_rank_has_its_ledger(tmp_path: Path, warm_python: WarmPython) -> None:
    """Each of two ranks under DDP writes a ledger with its number and its 20 steps."""
    for each in warm_python.together([Script(RANKS, (tmp_path, rank)) for rank in range(2)]):
        assert 0 == each.status, each.err
    ledgers = [load_run(tmp_path, rank) for rank in range(2)]
    assert [(0, 2, 20), (1, 2, 20)] == [(each.rank, each.ranks, each.steps) for each in ledgers]
    assert all("training/forward" in each.seconds for each in ledgers)


TRAINER = f"""{ASKED}
import transformers
from lflops.integrations.huggingface import FlopsCallback
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
    def forward(self, x, labels):
        logits = self.layer(x)
        return {{"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}}
data = [{{"x": torch.randn(8), "labels": number % 4}} for number in range(64)]
options = {{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2, "report_to": [], "use_cpu": True}}
quiet = {{"save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False}}
arguments = transformers.TrainingArguments(folder + "/out", **options, **quiet)
trainer = transformers.Trainer(Model(), arguments, train_dataset=data)
for training in range(2):
    trainer.train()
    (callback,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, FlopsCallback)]
    print(callback.ledger.steps, "training/forward" in callback.ledger.seconds)
"""


def test_a_trainer_of_transformers_gets_its_callback(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """A transformers Trainer gets one `FlopsCallback`, which a second `train` uses again.

    Two epochs of 64 samples in steps of 2 batches with 4 samples are 16 steps.
    """
    pytest.importorskip("accelerate")
    out = ended(warm_python, TRAINER, tmp_path).out
    lines = [line for line in out.splitlines() if line.startswith("16 ")]
    assert ["16 True"] * 2 == lines


PLANTED = f"""{ASKED}{MODEL}
from lflops.ledger import writer
from lflops.integrations.auto_detect import detected_phases
if sys.argv[2] == "meanwhile":
    writer.LOOK = 0.005
def fail(*_):
    raise RuntimeError("planted")
detected_phases.AutoDetectedPhases._fetch_begins = fail
loader = DataLoader(torch.randn(320, 64), batch_size=32)
steps = 0
while (steps < 10 or model._forward_pre_hooks) if sys.argv[2] == "meanwhile" else steps < 40:
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
print(len(model._forward_pre_hooks))
"""


@pytest.mark.parametrize(("when", "ends"), [("meanwhile", "0"), ("at the end", "1")])
def test_an_error_in_what_was_noted_ends_the_watching_alone(
    when: str, ends: str, tmp_path: Path, warm_python: WarmPython
) -> None:
    """An error while notes are processed ends the monitoring with one warning; training continues.

    The error occurs in the ledger's thread. The thread of the training run removes the hooks later:
    in one of its steps if the notes are processed early ("meanwhile"), else when the process ends.
    """
    result = ended(warm_python, PLANTED, tmp_path, when)
    assert ends == result.out.strip()
    assert 1 == result.err.count("planted")


def test_a_setting_that_cannot_be_is_warned_of(tmp_path: Path, warm_python: WarmPython) -> None:
    """With an unknown setting in `LFLOPS`, lflops warns, and training continues unmonitored."""
    result = ended(warm_python, PLAIN.replace("hardware=none", "activ=5"), tmp_path)
    assert (
        "this training run is not monitored because of an error: 'activ' is not a setting"
        in result.err
    )
    assert [] == list(tmp_path.iterdir())


COMPILES = f"""{ASKED}{MODEL}
import torch._dynamo
compiled = {{
    "script": lambda: torch.jit.script(model),
    "model": lambda: torch.compile(model, backend="eager", fullgraph=True),
    "loss": lambda: torch.compile(lambda x: model(x).square().mean(), backend="eager", fullgraph=True),
    "optimizer": lambda: torch.compile(lambda x: (model(x), optimizer.step())[0], backend="eager"),
}}[sys.argv[2]]
x = torch.randn(8, 64)
for step in range(8):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
function = compiled()
for rows in (8, 7):  # which is compiled for again
    print(function(x[:rows]).sum().item().hex())
print(torch._dynamo.utils.counters["stats"]["unique_graphs"], len(torch._dynamo.utils.counters["graph_break"]))
"""


@pytest.mark.parametrize("what", ["script", "model", "loss", "optimizer"])
def test_what_compiles_a_watched_model_sees_no_hook(
    what: str, tmp_path: Path, warm_python: WarmPython
) -> None:
    """Results, number of graphs and number of graph breaks are the same as without lflops."""
    watched = ended(warm_python, COMPILES, tmp_path, what).out
    unwatched = ended(warm_python, COMPILES, tmp_path, what, "unwatched").out
    assert unwatched == watched
    assert load_run(tmp_path).steps >= 8


MANY = f"""{ASKED}
models = [nn.Linear(4, 4) for _ in range(600)]
optimizer = torch.optim.SGD([each for model in models for each in model.parameters()], lr=0.1)
for step in range(2):
    sum(model(torch.ones(2, 4)).sum() for model in models).backward()
    optimizer.step()
    print(torch.jit.script(models[step])(torch.ones(2, 4)).sum().item().hex())
"""


def test_an_optimizer_of_many_models_lets_each_be_scripted(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """`torch.jit.script` works while lflops' hooks are on all 600 models of an optimizer.

    The hooks are there in the second step, in which lflops detects the models that are called.
    """
    watched = ended(warm_python, MANY, tmp_path).out
    unwatched = ended(warm_python, MANY, tmp_path, "unwatched").out
    assert unwatched == watched


THREADS = f"""{ASKED}{MODEL}
from threading import Thread
other = nn.Linear(4, 4)
others = torch.optim.SGD(other.parameters(), lr=0.1)
def train_other():
    for _ in range(50 if step > 3 else 0):
        other(torch.ones(2, 4)).sum().backward()
        others.step()
for step in range(12):
    thread = Thread(target=train_other)
    thread.start()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    thread.join()
"""


def test_what_another_thread_trains_is_no_part_of_the_loop(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """After a loop was detected, optimizer steps in other threads are ignored.

    In the same thread, 50 steps of another optimizer would mean that another loop has begun.
    """
    ended(warm_python, THREADS, tmp_path)
    assert 12 == load_run(tmp_path).steps


def test_a_finder_that_another_thread_is_loading_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`step_ends` does nothing while another thread imports the finder.

    During the import, the module is in `sys.modules`, but `current` is not defined yet.
    """
    monkeypatch.setitem(sys.modules, FINDER, ModuleType(FINDER))
    step_ends(None, (), {})


def test_modules_that_are_like_no_other_are_looked_at_all_the_same() -> None:
    """Unusual modules do not break the search for the modules with an optimizer's parameters.

    `Own` overrides `parameters` without arguments, and is found. `Half` has no attributes, because
    its `__init__` does not call that of `nn.Module`.
    """

    class Own(nn.Linear):
        def parameters(self) -> Any:  # type: ignore[override]
            return iter([self.weight])

    class Half(nn.Module):
        def __init__(self) -> None:
            """Create no attributes."""

    half = Half()
    own = Own(4, 4)
    assert [own] == modules_of(torch.optim.SGD([own.weight], lr=0.1))
    assert not vars(half)


def test_the_outermost_modules_of_an_optimizer_are_found() -> None:
    """For parameters of a wrapped module, `modules_of` returns only the outermost wrapper.

    Modules without any of the parameters are not returned.
    """
    inner = nn.Sequential(nn.Linear(2, 2))
    outer = nn.Sequential(inner, nn.ReLU())
    other = nn.Linear(2, 2)
    assert [outer] == modules_of(torch.optim.SGD(inner.parameters(), lr=0.1))
    of_both = torch.optim.SGD([*inner.parameters(), *other.parameters()], lr=0.1)
    assert {outer, other} == set(modules_of(of_both))


@pytest.mark.parametrize(
    ("value", "line"),
    [("", None), ("off", None), ("0", None), ("1", ""), ("Yes", ""), (" wait=2 ", "wait=2")],
)
def test_the_variable_says_whether_lflops_is_asked_for(
    value: str, line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`settings_line` returns `None` if the variable disables lflops, else the settings."""
    monkeypatch.setenv("LFLOPS", value)
    assert line == settings_line()
