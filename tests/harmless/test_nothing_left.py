"""Test that counting and measuring leave nothing behind, even if errors occur.

Every check has a twin that shows that it can fail.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lflops
from tests.support.canary_model import Patient, Raises, batch, in_forward, patient
from tests.support.leaky_profilers import CULPRITS, Culprit, PlainMode
from tests.support.process_state import (
    MISSING,
    Facts,
    about,
    differences,
    during,
    everything,
    settings,
)

pytestmark = pytest.mark.usefixtures("undisturbed")


@pytest.fixture
def model() -> Patient:
    """A model in the middle of a training run."""
    torch.manual_seed(0)
    return patient()


@pytest.fixture
def x() -> Tensor:
    """A batch for the model."""
    return batch()


def raises(error: BaseException) -> Callable[[], None]:
    """Return a function that raises the error."""

    def function(*_: object) -> None:
        raise error

    return function


Run = Callable[..., lflops.Profile]
Way = Callable[[Run, nn.Module, Tensor], object]


def run_in(context: Callable[[], contextlib.AbstractContextManager[object]], **options: Any) -> Way:
    """Return a way that runs inside a context."""

    def way(run: Run, model: nn.Module, x: Tensor) -> None:
        with context():
            run(model, x, **options)

    return way


def run_until(error: type[BaseException], **options: Any) -> Way:
    """Return a way that runs until lflops raises the expected error."""

    def way(run: Run, model: nn.Module, x: Tensor) -> None:
        with pytest.raises(error):
            run(model, x, **options)

    return way


def run_until_forward_raises(error: BaseException, passes: int = 1) -> Way:
    """Return a way that runs until forward raises the error in the last of `passes` passes.

    At this point, forward has drawn random numbers and changed buffers.
    """
    left = iter([None] * (passes - 1))

    def look() -> None:
        if next(left, MISSING) is MISSING:
            raise error

    def way(run: Run, model: nn.Module, x: Tensor) -> None:
        with in_forward(look), pytest.raises(type(error)):
            run(model, x, backward=True)

    return way


def run_in_forward(run: Run, model: nn.Module, x: Tensor) -> None:
    """Run a model inside its own forward."""
    inner = iter([model])

    def look() -> None:
        for each in inner:
            run(each, x, backward=True)

    with in_forward(look):
        run(model, x, backward=True)


def fails_at(passes: int, error: BaseException) -> Callable[[Tensor], Tensor]:
    """Return a loss with a backward that raises the error in the last of `passes` passes."""
    left = iter([None] * (passes - 1))

    def loss(out: Tensor) -> Tensor:
        if next(left, MISSING) is MISSING:
            out = Raises.apply(out, error)
        return out.sum()

    return loss


ERROR = ValueError("planted")

PASSES: dict[str, Run] = {
    "count": lflops.count,
    "measure": partial(lflops.measure, warmup=1, repeats=2),
}
HOOKED = 1 + 1 + 1 + 2
"""Number of the pass that is the second one with hooks in `measure`.

Before it, one pass is counted, one is a warm-up, one is timed, and one has hooks.
"""

WAYS: dict[str, Way] = {
    "forward": lambda run, model, x: run(model, x),
    "backward": lambda run, model, x: run(model, x, backward=True),
    "loss": lambda run, model, x: run(
        model, x, backward=True, loss=lambda out: out.square().mean()
    ),
    "keyword": lambda run, model, x: run(model, kwargs={"x": x}, backward=True),
    "ignored": lambda run, model, x: run(model, x, ignore=[nn.Linear, "norm"]),
    "twice": lambda run, model, x: [run(model, x, backward=True) for _ in range(2)],
    "no_grad": run_in(torch.no_grad),
    "no_grad, backward": run_in(torch.no_grad, backward=True),
    "inference_mode": run_in(torch.inference_mode),
    "inference_mode, backward": run_in(torch.inference_mode, backward=True),
    "autocast": run_in(lambda: torch.autocast("cpu", torch.bfloat16), backward=True),
    "default device": run_in(lambda: torch.device("meta"), backward=True),
    "saved tensors": run_in(
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), backward=True
    ),
    "within a mode": run_in(PlainMode, backward=True),
    "error in forward": run_until_forward_raises(ERROR),
    "Ctrl-C in forward": run_until_forward_raises(KeyboardInterrupt()),
    "error in backward": run_until(
        ValueError, backward=True, loss=lambda out: Raises.apply(out, ERROR).sum()
    ),
    "Ctrl-C in backward": run_until(
        KeyboardInterrupt,
        backward=True,
        loss=lambda out: Raises.apply(out, KeyboardInterrupt()).sum(),
    ),
    "error in loss": run_until(ValueError, backward=True, loss=raises(ERROR)),
    "loss of two elements": run_until(
        lflops.CountError, backward=True, loss=lambda out: out[0, :2]
    ),
    "loss without a graph": run_until(
        lflops.CountError, backward=True, loss=lambda out: out.detach().sum()
    ),
    "wrong argument": run_until(lflops.CountError, ignore=["nobody"]),
    "wrong input": run_until(TypeError, kwargs={"y": 1}),
    "within itself": run_in_forward,
    "within counting": lambda run, model, x: counted(model, lambda: run(model, x, backward=True)),
}

WHILE_HOOKED: dict[str, Callable[[], Way]] = {
    "error in forward": lambda: run_until_forward_raises(ERROR, HOOKED),
    "Ctrl-C in forward": lambda: run_until_forward_raises(KeyboardInterrupt(), HOOKED),
    "error in backward": lambda: run_until(ValueError, backward=True, loss=fails_at(HOOKED, ERROR)),
    "Ctrl-C in backward": lambda: run_until(
        KeyboardInterrupt, backward=True, loss=fails_at(HOOKED, KeyboardInterrupt())
    ),
}


@pytest.mark.parametrize("run", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_nothing_leaves_a_trace(way: Way, run: Run, model: Patient, x: Tensor) -> None:
    """The model and the process are as before, to the bit, with the same objects.

    The comparison has names, modes, hooks, attributes, parameters, buffers, gradients and random
    numbers.
    """
    before = everything(model, x)
    way(run, model, x)
    assert [] == differences(before, everything(model, x))


ESTIMATED = {
    name: way
    for name, way in WAYS.items()
    if name not in ("ignored", "wrong argument", "within itself")
}
"""The ways that `lflops.estimate` supports: it has no `ignore`, and cannot run inside itself."""


@pytest.mark.parametrize("way", ESTIMATED.values(), ids=ESTIMATED)
def test_an_estimate_leaves_no_trace(way: Way, model: Patient, x: Tensor) -> None:
    """An estimate gives the model fake tensors, and puts the real ones back."""
    before = everything(model, x)
    way(lflops.estimate, model, x)
    assert [] == differences(before, everything(model, x))


@pytest.mark.parametrize("way", WHILE_HOOKED.values(), ids=WHILE_HOOKED)
def test_an_error_while_modules_are_timed_leaves_no_trace(
    way: Callable[[], Way], model: Patient, x: Tensor
) -> None:
    """The error occurs in a pass with hooks on modules, and no hook is left behind."""
    before = everything(model, x)
    way()(PASSES["measure"], model, x)
    assert [] == differences(before, everything(model, x))


@pytest.mark.parametrize(("culprit", "expected"), CULPRITS.values(), ids=CULPRITS)
def test_a_trace_is_found_and_named(
    culprit: Culprit, expected: list[str], model: Patient, x: Tensor
) -> None:
    """The comparison names the things that a culprit leaves behind, and nothing else."""
    before = everything(model, x)
    with contextlib.ExitStack() as undo:
        culprit(undo, model, x)
        assert sorted(expected) == differences(before, everything(model, x))


def test_every_fact_about_the_process_has_its_culprit() -> None:
    """Each compared setting of the process is changed by a culprit, so its check can fail."""
    found = set()
    for _, expected in CULPRITS.values():
        found.update(expected)
    assert set() == settings().keys() - found


def counted(model: nn.Module, action: Callable[[], object]) -> lflops.Profile:
    """Return the profile of the work that the action runs."""
    with lflops.counting(model) as counted:
        action()
    return counted.profile


def interleaved(model: nn.Module, x: Tensor) -> None:
    """Run two counts at once. The count that is entered first is left first."""
    first = lflops.counting(model)
    second = lflops.counting(model)
    first.__enter__()
    second.__enter__()
    model(x)
    first.__exit__(None, None, None)
    model(x)
    second.__exit__(None, None, None)
    assert 2 * first.profile.total() == second.profile.total()


def nested(model: nn.Module, x: Tensor) -> None:
    """Run two counts, one inside the other."""
    with lflops.counting(model) as outer, lflops.scope("outside"):
        model(x)
        with lflops.counting(model) as inner:
            model(x)
    assert 2 * inner.profile.total() == outer.profile.total()


def counting_until(error: BaseException) -> Callable[[nn.Module, Tensor], object]:
    """Return a way that counts a loop which ends with an error in forward."""

    def way(model: nn.Module, x: Tensor) -> None:
        with (
            in_forward(raises(error)),
            pytest.raises(type(error)),
            lflops.counting(model),
            lflops.scope("part"),
        ):
            model(x)

    return way


def left_by_return(model: nn.Module, x: Tensor) -> Any:
    """Leave a count with a `return` statement."""
    with lflops.counting(model):
        return torch.autograd.grad(model(x).sum(), x)


def abandoned(model: nn.Module, x: Tensor) -> None:
    """Start a generator that counts, and never finish it."""

    def steps() -> Iterator[Tensor]:
        with lflops.counting(model):
            while True:
                yield model(x)

    next(steps())


def entered_twice(model: nn.Module, x: Tensor) -> None:
    """Enter a count that is already entered."""
    count = lflops.counting(model)
    with count, pytest.raises(lflops.CountError, match="counting"), count:
        model(x)


COUNTINGS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "forward": lambda model, x: counted(model, lambda: model(x)),
    "gradient": lambda model, x: counted(model, lambda: torch.autograd.grad(model(x).sum(), x)),
    "nothing": lambda model, x: counted(model, lambda: None),
    "never entered": lambda model, x: lflops.counting(model),
    "nested": nested,
    "interleaved": interleaved,
    "error": counting_until(ERROR),
    "Ctrl-C": counting_until(KeyboardInterrupt()),
    "return": left_by_return,
    "abandoned": abandoned,
    "entered twice": entered_twice,
}


@pytest.mark.parametrize("way", COUNTINGS.values(), ids=COUNTINGS)
def test_counting_leaves_no_trace(
    way: Callable[[nn.Module, Tensor], object], model: Patient, x: Tensor
) -> None:
    """Counting a custom loop leaves nothing behind.

    The model is in evaluation mode, so the loop itself changes nothing.
    """
    model.eval()
    before = everything(model, x)
    way(model, x)
    assert [] == differences(before, everything(model, x))


def facts_in_forward(model: Patient, action: Callable[[], object]) -> list[str]:
    """Return the names of the facts that differ while the action runs the model's forward."""
    before = during(model)
    found: list[Facts] = []
    with in_forward(lambda: found.append(during(model))):
        action()
    names = set()
    for inside in found:
        names.update(differences(before, inside))
    return sorted(names)


def test_nothing_is_patched_or_written_while_a_pass_runs(model: Patient, x: Tensor) -> None:
    """During a pass, lflops replaces only the constructor of tensors and the start of backward.

    The model can also be pickled and copied during the pass.
    """
    replaced = ["torch.Tensor.__new__", "torch.autograd._engine_run_backward"]
    model.eval()
    for run in PASSES.values():
        assert replaced == facts_in_forward(model, lambda run=run: run(model, x, backward=True))
    assert replaced == facts_in_forward(model, lambda: counted(model, lambda: model(x)))


IN_PASS = [
    "patches a function",
    "patches the call of modules",
    "patches an ATen packet",
    "writes on a module",
    "wraps a module's forward",
    "writes on a parameter",
    "leaves a hook that cannot be pickled",
    "leaves a lock on a module",
    "swaps stdout",
    "leaves a file open",
    "leaves a thread",
]


@pytest.mark.parametrize(("culprit", "expected"), [CULPRITS[each] for each in IN_PASS], ids=IN_PASS)
def test_what_is_patched_for_the_pass_only_is_found(
    culprit: Culprit, expected: list[str], model: Patient, x: Tensor
) -> None:
    """A culprit is found even if it undoes its change at the end of the pass."""

    def tidy() -> None:
        with contextlib.ExitStack() as undo:
            culprit(undo, model, x)
            model(x)

    assert sorted(expected) == facts_in_forward(model.eval(), tidy)


@pytest.mark.parametrize("run", PASSES.values(), ids=PASSES)
def test_a_leaf_that_only_the_loss_knows_keeps_its_gradient(
    run: Run, model: Patient, x: Tensor
) -> None:
    """A leaf tensor that only the loss uses has the same gradient as before, or still none.

    The tensor is neither a parameter nor an input.
    """
    known = batch()
    new = torch.ones(4, requires_grad=True)
    before = about("known", known) | about("new", new)
    run(model, x, backward=True, loss=lambda out: (out * new * known).sum())
    assert [] == differences(before, about("known", known) | about("new", new))
    (model(x) * new * known).sum().backward()
    assert ["known.grad", "new.grad"] == differences(
        before, about("known", known) | about("new", new)
    )


@pytest.mark.parametrize("run", PASSES.values(), ids=PASSES)
def test_an_input_that_a_graph_of_the_users_made_can_still_go_backward(
    run: Run, model: Patient
) -> None:
    """Counting a head does not run the backward of the body that computed its input.

    The work of the body is not counted, and the user can still run its backward.
    """
    body = nn.Sequential(nn.Linear(5, 4), nn.Tanh())
    features = body(torch.randn(3, 5))
    before = everything(model, features)
    on_leaf = run(model, features.detach().requires_grad_(), backward=True)
    profile = run(model, features, backward=True)
    assert [] == differences(before, everything(model, features))
    features.sum().backward()
    assert body[0].weight.grad is not None
    assert on_leaf.by_module("backward") == profile.by_module("backward")


@pytest.mark.parametrize("run", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_an_input_that_the_model_writes_to_is_not_written_to(
    context: Callable[[], contextlib.AbstractContextManager[object]], run: Run
) -> None:
    """A head that begins with an in-place operator does not change the user's features.

    The features have a graph.
    """
    features = nn.Linear(5, 4)(torch.randn(3, 5))
    head = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2))
    before = about("features", features)
    with context():
        profile = run(head, features, backward=True)
    assert [] == differences(before, about("features", features))
    assert 3 * 8 == profile.total(phase="forward")
    assert 2 * 3 * 8 == profile.total(phase="backward")


@pytest.mark.parametrize("run", PASSES.values(), ids=PASSES)
def test_a_graph_that_was_there_before_goes_backward_afterwards(
    run: Run, model: Patient, x: Tensor
) -> None:
    """A count between the user's forward and backward does not change the gradients.

    The counted pass changes buffers that the graph has saved.
    """
    (expected,) = torch.autograd.grad(nn.functional.relu(model.norm(model.embedding(x))).sum(), x)
    out = nn.functional.relu(model.norm(model.embedding(x))).sum()
    run(model, x, backward=True)
    (actual,) = torch.autograd.grad(out, x)
    assert torch.equal(expected, actual)


def test_random_numbers_of_the_inputs_device_are_put_back(cuda: torch.device) -> None:
    """The random state of the input's device is restored. The model has no tensors there."""
    before = torch.cuda.get_rng_state(cuda)
    lflops.count(nn.Dropout(), torch.ones(8, device=cuda))
    assert torch.equal(before, torch.cuda.get_rng_state(cuda))


ODD_BUFFERS: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "bits": lambda: torch.zeros(3, dtype=torch.uint8).view(torch.bits8),
    "empty": lambda: torch.zeros(0),
    "expanded": lambda: torch.ones(1).expand(3),
}


@pytest.mark.parametrize("run", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("make", ODD_BUFFERS.values(), ids=ODD_BUFFERS)
def test_a_model_with_an_odd_buffer_is_counted(
    make: Callable[[], Tensor], run: Run, model: Patient, x: Tensor
) -> None:
    """Buffers that cannot be compared or written as usual do not prevent restoring the others."""
    model.register_buffer("odd", make())
    odd = model.odd
    steps = model.steps.item()
    average = model.average
    run(model, x, backward=True)
    assert odd is model.odd
    assert steps == model.steps.item()
    assert average is model.average
