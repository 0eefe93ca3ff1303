"""What counting and measuring leave behind: nothing, whatever happens in them. Every check has a twin that sees it fail."""

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
from tests.support.process_state import MISSING, Facts, about, differences, during, everything, settings

pytestmark = pytest.mark.usefixtures("undisturbed")


@pytest.fixture
def model() -> Patient:
    """A model in the middle of a training."""
    torch.manual_seed(0)
    return patient()


@pytest.fixture
def x() -> Tensor:
    """Its batch."""
    return batch()


def raises(error: BaseException) -> Callable[[], None]:
    """A function that raises the error."""

    def function(*_: object) -> None:
        raise error

    return function


Run = Callable[..., lflops.Profile]
Way = Callable[[Run, nn.Module, Tensor], object]


def run_in(context: Callable[[], contextlib.AbstractContextManager[object]], **options: Any) -> Way:
    """Run within a context."""

    def way(run: Run, model: nn.Module, x: Tensor) -> None:
        with context():
            run(model, x, **options)

    return way


def run_until(error: type[BaseException], **options: Any) -> Way:
    """Run until the error comes, which is let through."""

    def way(run: Run, model: nn.Module, x: Tensor) -> None:
        with pytest.raises(error):
            run(model, x, **options)

    return way


def run_until_forward_raises(error: BaseException, passes: int = 1) -> Way:
    """Run until the error comes out of the middle of forward, when random numbers are drawn and buffers are changed."""
    left = iter([None] * (passes - 1))

    def look() -> None:
        if next(left, MISSING) is MISSING:
            raise error

    def way(run: Run, model: nn.Module, x: Tensor) -> None:
        with in_forward(look), pytest.raises(type(error)):
            run(model, x, backward=True)

    return way


def run_in_forward(run: Run, model: nn.Module, x: Tensor) -> None:
    """Run a model while it is run."""
    inner = iter([model])

    def look() -> None:
        for each in inner:
            run(each, x, backward=True)

    with in_forward(look):
        run(model, x, backward=True)


def fails_at(passes: int, error: BaseException) -> Callable[[Tensor], Tensor]:
    """A loss from which it is not possible to go backward in the last of so many passes."""
    left = iter([None] * (passes - 1))
    return lambda out: (Raises.apply(out, error) if next(left, MISSING) is MISSING else out).sum()


ERROR = ValueError("planted")

PASSES: dict[str, Run] = {"count": lflops.count, "measure": partial(lflops.measure, warmup=1, repeats=2)}
HOOKED = 1 + 1 + 1 + 2
"""One is counted, one warms up, one is clean: this is the second that `measure` hooks."""

WAYS: dict[str, Way] = {
    "forward": lambda run, model, x: run(model, x),
    "backward": lambda run, model, x: run(model, x, backward=True),
    "loss": lambda run, model, x: run(model, x, backward=True, loss=lambda out: out.square().mean()),
    "keyword": lambda run, model, x: run(model, kwargs={"x": x}, backward=True),
    "ignored": lambda run, model, x: run(model, x, ignore=[nn.Linear, "norm"]),
    "twice": lambda run, model, x: [run(model, x, backward=True) for _ in range(2)],
    "no_grad": run_in(torch.no_grad),
    "no_grad, backward": run_in(torch.no_grad, backward=True),
    "inference_mode": run_in(torch.inference_mode),
    "inference_mode, backward": run_in(torch.inference_mode, backward=True),
    "autocast": run_in(lambda: torch.autocast("cpu", torch.bfloat16), backward=True),
    "default device": run_in(lambda: torch.device("meta"), backward=True),
    "saved tensors": run_in(lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), backward=True),
    "within a mode": run_in(PlainMode, backward=True),
    "error in forward": run_until_forward_raises(ERROR),
    "Ctrl-C in forward": run_until_forward_raises(KeyboardInterrupt()),
    "error in backward": run_until(ValueError, backward=True, loss=lambda out: Raises.apply(out, ERROR).sum()),
    "Ctrl-C in backward": run_until(KeyboardInterrupt, backward=True, loss=lambda out: Raises.apply(out, KeyboardInterrupt()).sum()),
    "error in loss": run_until(ValueError, backward=True, loss=raises(ERROR)),
    "loss of two elements": run_until(lflops.CountError, backward=True, loss=lambda out: out[0, :2]),
    "loss without a graph": run_until(lflops.CountError, backward=True, loss=lambda out: out.detach().sum()),
    "wrong argument": run_until(lflops.CountError, ignore=["nobody"]),
    "wrong input": run_until(TypeError, kwargs={"y": 1}),
    "within itself": run_in_forward,
    "within counting": lambda run, model, x: counted(model, lambda: run(model, x, backward=True)),
}

WHILE_HOOKED: dict[str, Callable[[], Way]] = {
    "error in forward": lambda: run_until_forward_raises(ERROR, HOOKED),
    "Ctrl-C in forward": lambda: run_until_forward_raises(KeyboardInterrupt(), HOOKED),
    "error in backward": lambda: run_until(ValueError, backward=True, loss=fails_at(HOOKED, ERROR)),
    "Ctrl-C in backward": lambda: run_until(KeyboardInterrupt, backward=True, loss=fails_at(HOOKED, KeyboardInterrupt())),
}


@pytest.mark.parametrize("run", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_nothing_leaves_a_trace(way: Way, run: Run, model: Patient, x: Tensor) -> None:
    """Names, modes, hooks, attributes, parameters, buffers, gradients, random numbers: all is as it was, to the bit and to the object."""
    before = everything(model, x)
    way(run, model, x)
    assert [] == differences(before, everything(model, x))


ESTIMATED = {name: way for name, way in WAYS.items() if name not in ("ignored", "wrong argument", "within itself")}
"""It takes no `ignore`, and one within another is refused, as fake models are."""


@pytest.mark.parametrize("way", ESTIMATED.values(), ids=ESTIMATED)
def test_an_estimate_leaves_no_trace(way: Way, model: Patient, x: Tensor) -> None:
    """Nor does one that lends the model fake tensors and takes them back."""
    before = everything(model, x)
    way(lflops.estimate, model, x)
    assert [] == differences(before, everything(model, x))


@pytest.mark.parametrize("way", WHILE_HOOKED.values(), ids=WHILE_HOOKED)
def test_an_error_while_modules_are_timed_leaves_no_trace(way: Callable[[], Way], model: Patient, x: Tensor) -> None:
    """Not in the counted pass nor in a clean one, where hooks cannot be left behind, but in one that has them."""
    before = everything(model, x)
    way()(PASSES["measure"], model, x)
    assert [] == differences(before, everything(model, x))


@pytest.mark.parametrize(("culprit", "expected"), CULPRITS.values(), ids=CULPRITS)
def test_a_trace_is_found_and_named(culprit: Culprit, expected: list[str], model: Patient, x: Tensor) -> None:
    """Whatever a culprit leaves behind, the comparison says what it is, and nothing else."""
    before = everything(model, x)
    with contextlib.ExitStack() as undo:
        culprit(undo, model, x)
        assert sorted(expected) == differences(before, everything(model, x))


def test_every_fact_about_the_process_has_its_culprit() -> None:
    """No check is there that was never seen to fail."""
    assert set() == settings().keys() - {name for _, expected in CULPRITS.values() for name in expected}


def counted(model: nn.Module, action: Callable[[], object]) -> lflops.Profile:
    """What runs in the action, counted."""
    with lflops.counting(model) as counted:
        action()
    return counted.profile


def interleaved(model: nn.Module, x: Tensor) -> None:
    """Two counts, of which the first that is entered is the first to be left."""
    first, second = lflops.counting(model), lflops.counting(model)
    first.__enter__()
    second.__enter__()
    model(x)
    first.__exit__(None, None, None)
    model(x)
    second.__exit__(None, None, None)
    assert 2 * first.profile.total() == second.profile.total()


def nested(model: nn.Module, x: Tensor) -> None:
    """Two counts, one within the other."""
    with lflops.counting(model) as outer, lflops.scope("outside"):
        model(x)
        with lflops.counting(model) as inner:
            model(x)
    assert 2 * inner.profile.total() == outer.profile.total()


def counting_until(error: BaseException) -> Callable[[nn.Module, Tensor], object]:
    """A loop that ends by an error in forward."""

    def way(model: nn.Module, x: Tensor) -> None:
        with in_forward(raises(error)), pytest.raises(type(error)), lflops.counting(model), lflops.scope("part"):
            model(x)

    return way


def left_by_return(model: nn.Module, x: Tensor) -> Any:
    """A count that is left from the middle of it."""
    with lflops.counting(model):
        return torch.autograd.grad(model(x).sum(), x)


def abandoned(model: nn.Module, x: Tensor) -> None:
    """A generator that counts and is never finished."""

    def steps() -> Iterator[Tensor]:
        with lflops.counting(model):
            while True:
                yield model(x)

    next(steps())


def entered_twice(model: nn.Module, x: Tensor) -> None:
    """One and the same count, entered while it is entered."""
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
def test_counting_leaves_no_trace(way: Callable[[nn.Module, Tensor], object], model: Patient, x: Tensor) -> None:
    """The same of a loop of one's own, in which the model evaluates, so that the loop itself changes nothing."""
    model.eval()
    before = everything(model, x)
    way(model, x)
    assert [] == differences(before, everything(model, x))


def facts_in_forward(model: Patient, action: Callable[[], object]) -> list[str]:
    """What is different while the action runs the model."""
    before, found = during(model), list[Facts]()
    with in_forward(lambda: found.append(during(model))):
        action()
    return sorted({name for inside in found for name in differences(before, inside)})


def test_nothing_is_patched_or_written_while_a_pass_runs(model: Patient, x: Tensor) -> None:
    """Within the pass too, all but the constructor of tensors is the user's, and the model is pickled and copied."""
    constructor = ["torch.Tensor.__new__"]
    model.eval()
    for run in PASSES.values():
        assert constructor == facts_in_forward(model, lambda run=run: run(model, x, backward=True))
    assert constructor == facts_in_forward(model, lambda: counted(model, lambda: model(x)))


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
def test_what_is_patched_for_the_pass_only_is_found(culprit: Culprit, expected: list[str], model: Patient, x: Tensor) -> None:
    """A culprit that tidies up after itself is still one."""

    def tidy() -> None:
        with contextlib.ExitStack() as undo:
            culprit(undo, model, x)
            model(x)

    assert sorted(expected) == facts_in_forward(model.eval(), tidy)


@pytest.mark.parametrize("run", PASSES.values(), ids=PASSES)
def test_a_leaf_that_only_the_loss_knows_keeps_its_gradient(run: Run, model: Patient, x: Tensor) -> None:
    """It is no parameter and no input, and still the same gradient is on it afterwards; one without gets none."""
    known, new = batch(), torch.ones(4, requires_grad=True)
    before = about("known", known) | about("new", new)
    run(model, x, backward=True, loss=lambda out: (out * new * known).sum())
    assert [] == differences(before, about("known", known) | about("new", new))
    (model(x) * new * known).sum().backward()
    assert ["known.grad", "new.grad"] == differences(before, about("known", known) | about("new", new))


@pytest.mark.parametrize("run", PASSES.values(), ids=PASSES)
def test_an_input_that_a_graph_of_the_users_made_can_still_go_backward(run: Run, model: Patient) -> None:
    """Counting a head does not go on into the body below it: that work is not counted, and its graph is still there to be used."""
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
    """A head that begins in place is counted on features that have a history, and the features are not changed by it."""
    features = nn.Linear(5, 4)(torch.randn(3, 5))
    head = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2))
    before = about("features", features)
    with context():
        profile = run(head, features, backward=True)
    assert [] == differences(before, about("features", features))
    assert {"forward": 3 * 8, "backward": 2 * 3 * 8} == {phase: profile.total(phase=phase) for phase in ("forward", "backward")}


@pytest.mark.parametrize("run", PASSES.values(), ids=PASSES)
def test_a_graph_that_was_there_before_goes_backward_afterwards(run: Run, model: Patient, x: Tensor) -> None:
    """A pass between forward and backward changes no gradient, though it moved buffers that the graph had saved."""
    (expected,) = torch.autograd.grad(nn.functional.relu(model.norm(model.embedding(x))).sum(), x)
    out = nn.functional.relu(model.norm(model.embedding(x))).sum()
    run(model, x, backward=True)
    (actual,) = torch.autograd.grad(out, x)
    assert torch.equal(expected, actual)


def test_random_numbers_of_the_inputs_device_are_put_back(cuda: torch.device) -> None:
    """Also where neither a parameter nor a buffer says that the model runs there."""
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
def test_a_model_with_an_odd_buffer_is_counted(make: Callable[[], Tensor], run: Run, model: Patient, x: Tensor) -> None:
    """Buffers that cannot be compared or written to in the ordinary way do not stand in the way of putting the others back."""
    model.register_buffer("odd", make())
    before = (model.odd, model.steps.item(), model.average)
    run(model, x, backward=True)
    assert before[0] is model.odd
    assert before[1] == model.steps.item()
    assert before[2] is model.average
