"""Test the arguments of `lflops.count`, `counting`, `scope` and `register_formula`.

Every accepted form works. A wrong argument raises an error that names it. Ignored modules are left
out of all totals.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lflops
from lflops.profile.notes import sentence
from lflops.profile.profile import Profile
from tests.support.profile_checks import names_what_is_taken


class Net(nn.Module):
    """Two layers with 4 * 8 and 8 * 2 MACs per sample; a keyword argument doubles the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x: Tensor, *, twice: bool = False) -> Tensor:
        out = self.second(self.first(x))
        return 2 * out if twice else out


x = torch.ones(3, 4)
net = Net()


def enter_scope(name: Any) -> None:
    """Enter a scope, which checks its name."""
    with lflops.scope(name):
        pass


WRONG: dict[str, tuple[Callable[[], object], type[Exception], list[str]]] = {
    "model, a class": (
        lambda: lflops.count(Net, x),
        lflops.CountError,
        ["count: Net is a class: pass an instance"],
    ),
    "model, a function": (
        lambda: lflops.count(len, x),
        lflops.CountError,
        ["count", "built-in function len", "torch.nn.Module"],
    ),
    "args, a mapping": (
        lambda: lflops.count(net, {"x": x}),
        lflops.CountError,
        [
            (
                "count: args is a dict: pass kwargs=batch, or args=(batch,) if the dict itself "
                "is the model's argument"
            )
        ],
    ),
    "args, a list": (
        lambda: lflops.count(net, [x]),
        lflops.CountError,
        [
            (
                "count: args is a list: pass args=(batch,) if the list is the model's argument, "
                "or args=tuple(batch) if the list contains the model's arguments"
            )
        ],
    ),
    "backward, a number": (
        lambda: lflops.count(net, x, backward=1),
        lflops.CountError,
        ["count: backward=1: pass True or False"],
    ),
    "backward, a tensor": (
        lambda: lflops.count(net, x, backward=x),
        lflops.CountError,
        ["count: backward=a tensor of shape", "True"],
    ),
    "counting a class": (
        lambda: lflops.counting(Net),
        lflops.CountError,
        ["counting: Net is a class: pass an instance"],
    ),
    "args, nothing": (
        lambda: lflops.count(net, None),
        lflops.CountError,
        ["count", "args=None", "tuple", "tensor"],
    ),
    "args, text": (
        lambda: lflops.count(net, "ab"),
        lflops.CountError,
        ["count", "args='ab'", "tuple", "tensor"],
    ),
    "kwargs, a number": (
        lambda: lflops.count(net, x, 3),
        lflops.CountError,
        ["count", "kwargs=3", "dict"],
    ),
    "kwargs, a list": (
        lambda: lflops.count(net, x, ["twice"]),
        lflops.CountError,
        ["count", "kwargs=['twice']", "dict"],
    ),
    "kwargs, a tensor": (
        lambda: lflops.count(net, x, x),
        lflops.CountError,
        ["count", "kwargs=a tensor of shape (3, 4)", "dict"],
    ),
    "kwargs, without names": (
        lambda: lflops.count(net, x, {1: True}),
        lflops.CountError,
        ["count", "kwargs={1: True}", "keyword"],
    ),
    "loss, a number": (
        lambda: lflops.count(net, x, backward=True, loss=3),
        lflops.CountError,
        ["count", "loss=3", "function", "scalar"],
    ),
    "loss, without backward": (
        lambda: lflops.count(net, x, loss=torch.sum),
        lflops.CountError,
        ["count", "loss", "backward=True"],
    ),
    "loss, of two elements": (
        lambda: lflops.count(net, x, backward=True, loss=lambda out: out[0]),
        lflops.CountError,
        ["count", "loss", "a tensor of shape (2,) and dtype torch.float32", "one element"],
    ),
    "loss, a float": (
        lambda: lflops.count(net, x, backward=True, loss=lambda _: 0.0),
        lflops.CountError,
        ["count", "loss returned 0.0", "tensor of one element", "gradient"],
    ),
    "loss, without a gradient": (
        lambda: lflops.count(net, x, backward=True, loss=lambda out: out.detach().sum()),
        lflops.CountError,
        ["count", "loss", "a tensor of shape ()", "requires a gradient"],
    ),
    "loss, nothing": (
        lambda: lflops.count(net, x, backward=True, loss=lambda out: None),
        lflops.CountError,
        ["count", "loss returned None", "tensor"],
    ),
    "nothing to train": (
        lambda: lflops.count(nn.Linear(4, 2).requires_grad_(requires_grad=False), x, backward=True),
        lflops.CountError,
        ["count", "backward=True", "loss=", "unfreeze"],
    ),
    "ignore, an unknown name": (
        lambda: lflops.count(net, x, ignore=["third"]),
        lflops.CountError,
        ["ignore", "'third'", "named_modules"],
    ),
    "ignore, a number": (
        lambda: lflops.count(net, x, ignore=3),
        lflops.CountError,
        ["ignore", "3", "name", "module class"],
    ),
    "ignore, nothing": (
        lambda: lflops.count(net, x, ignore=None),
        lflops.CountError,
        ["ignore", "None", "name", "module class"],
    ),
    "ignore, a module": (
        lambda: lflops.count(net, x, ignore=net.first),
        lflops.CountError,
        ["ignore", "Linear(", "name", "module class"],
    ),
    "ignore, another class": (
        lambda: lflops.count(net, x, ignore=[int]),
        lflops.CountError,
        ["ignore", "class 'int'", "module class"],
    ),
    "counting nothing": (lflops.counting, lflops.CountError, ["counting", "at least one module"]),
    "counting a list": (
        lambda: lflops.counting([net]),
        lflops.CountError,
        ["counting", "[Net(", "torch.nn.Module"],
    ),
    "counting and ignoring": (
        lambda: lflops.counting(net, ignore=["third"]),
        lflops.CountError,
        ["ignore", "'third'"],
    ),
    "scope, without a name": (
        lambda: enter_scope(""),
        ValueError,
        ["scope", "name=''", "has no dots"],
    ),
    "scope, with a dot": (
        lambda: enter_scope("a.b"),
        ValueError,
        ["scope", "name='a.b'", "has no dots"],
    ),
    "scope, a number": (
        lambda: enter_scope(3),
        ValueError,
        ["scope", "name=3", "pass a name that is not empty and has no dots"],
    ),
    "operator, text": (
        lambda: lflops.register_formula("aten::mm", lambda *_, out: 1),
        lflops.CountError,
        ["register_formula", "operator='aten::mm'", "torch.ops.my.op"],
    ),
    "operator, a function": (
        lambda: lflops.register_formula(torch.mm, lambda *_, out: 1),
        lflops.CountError,
        ["register_formula", "operator=<built-in method mm", "torch.ops.my.op"],
    ),
    "formula, a number": (
        lambda: lflops.register_formula(torch.ops.aten.mm, 3),
        lflops.CountError,
        ["register_formula", "formula=3", "function of shapes"],
    ),
}


@pytest.mark.parametrize(("call", "error", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named_with_what_is_taken(
    call: Callable[[], object], error: type[Exception], said: list[str]
) -> None:
    """The message names the function, the wrong argument and the accepted values.

    They come in this order, on one line of fewer than 250 characters.
    """
    names_what_is_taken(call, error, said, shorter_than=250)


def test_what_the_user_raises_is_let_through() -> None:
    """Errors raised by the model or by the loss function are not turned into a `CountError`."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'thrice'"):
        lflops.count(net, x, {"thrice": True})
    with pytest.raises(ZeroDivisionError):
        lflops.count(net, x, backward=True, loss=lambda out: 1 / 0)


FORMS: dict[str, Callable[[], Profile]] = {
    "a tuple": lambda: lflops.count(net, (x,)),
    "a lone tensor": lambda: lflops.count(net, x),
    "keyword only": lambda: lflops.count(net, kwargs={"x": x}),
    "both": lambda: lflops.count(net, x, {"twice": True}),
    "ignoring nothing": lambda: lflops.count(net, x, ignore=()),
    "ignoring a class that is not there": lambda: lflops.count(net, x, ignore=nn.Conv2d),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_arguments_are_taken_in_every_form(form: Callable[[], Profile]) -> None:
    """Each form counts 3 samples of 4 * 8 + 8 * 2 MACs, and the run records the input's shape."""
    profile = form()
    assert 3 * (4 * 8 + 8 * 2) == profile.total()
    assert [(3, 4)] == list(profile.run.shapes.values())


def test_a_batch_whose_parts_refer_to_each_other_is_looked_through_once() -> None:
    """The search for tensors visits each object once, not once for each path that leads to it.

    Sixteen nodes all refer to each other, so there are far too many paths to follow.
    """

    class Node:
        pass

    nodes = [Node() for _ in range(16)]
    for node in nodes:
        node.x = x
        node.neighbours = nodes

    class First(Net):
        def forward(self, graph: Any) -> Tensor:
            return super().forward(graph.x)

    assert 3 * 48 == lflops.count(First(), (nodes[0],), backward=True).total()


def test_a_model_on_the_meta_device_is_counted() -> None:
    """Meta tensors have no data, but the model has the same MACs as on a CPU."""
    assert 3 * 48 == lflops.count(Net().to("meta"), x.to("meta"), backward=True).total()


def within(mode: Any, call: Callable[[], object]) -> object:
    """Return the result of a call inside a mode."""
    with mode:
        return call()


FAKE = FakeTensorMode()
PRETENDED: dict[str, Callable[[], object]] = {
    "a mode around all": lambda: within(FAKE, lambda: lflops.count(Net(), torch.ones(3, 4))),
    "a mode around the count": lambda: within(
        FakeTensorMode(allow_non_fake_inputs=True), lambda: lflops.count(net, x)
    ),
    "a model": lambda: lflops.count(within(FAKE, Net), x),
    "buffers": lambda: lflops.count(within(FAKE, lambda: nn.BatchNorm1d(4, affine=False)), x),
    "a batch": lambda: lflops.count(net, kwargs={"x": within(FAKE, lambda: torch.ones(3, 4))}),
}


@pytest.mark.parametrize("call", PRETENDED.values(), ids=PRETENDED)
def test_fake_tensors_are_refused(call: Callable[[], object]) -> None:
    """No operator runs on fake tensors, so all counts would be zero."""
    with pytest.raises(
        lflops.CountError,
        match="fake, so nothing would be counted: create the model on device='meta'",
    ):
        call()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_script_is_noted_for_its_parts_never_show_as_called() -> None:
    """Only the outermost script is noted. A script without submodules needs no note.

    lflops cannot see the calls of submodules inside a script.
    """
    scripted = torch.jit.trace(nn.Sequential(nn.Sequential(nn.Linear(4, 8)), nn.Linear(8, 2)), x)
    profile = lflops.count(nn.Sequential(scripted, torch.jit.trace(nn.ReLU(), x)), x)
    assert 3 * 48 == profile.total()
    assert [("scripted", "0")] == [(note.code, note.subject) for note in profile.notes]


IGNORED: dict[str, tuple[Any, set[str]]] = {
    "a name": (["first"], {"first"}),
    "a lone name": ("first", {"first"}),
    "names": (["first", "second"], {"first", "second"}),
    "a class": ([nn.Linear], {"first", "second"}),
    "a lone class": (nn.Linear, {"first", "second"}),
    "a name and a class": (("first", nn.Linear), {"first", "second"}),
    "an iterator": (iter(["second"]), {"second"}),
    "the root": ([""], {""}),
}


@pytest.mark.parametrize(("ignore", "rows"), IGNORED.values(), ids=IGNORED)
def test_what_is_ignored_is_in_no_total_and_in_the_notes(ignore: Any, rows: set[str]) -> None:
    """The counts of both phases exclude the ignored modules, also in the modules above them.

    Each ignored module has a note with the MACs that it has in a count without `ignore`.
    """
    arguments: dict[str, Any] = {"args": x, "kwargs": {"twice": True}, "backward": True}
    whole = lflops.count(net, **arguments)
    profile = lflops.count(net, **arguments, ignore=ignore)
    for phase in ("forward", "backward"):
        for figure in ("macs", "executed_macs", "flops", "bytes_moved", "calls"):
            ignored = sum(getattr(whole.modules[row].work(phase), f"self_{figure}") for row in rows)
            before = getattr(whole.modules[""].work(phase), figure)
            after = getattr(profile.modules[""].work(phase), figure)
            assert before - ignored == after

    ignored_macs = 0
    for cell in whole.op_counts:
        if cell.module in rows and cell.phase == "forward":
            ignored_macs += cell.macs
    assert whole.total() - ignored_macs == profile.total()
    assert [] == [cell for cell in profile.op_counts if cell.module in rows]

    noted = {note.subject: note.values["macs"] for note in profile.notes if note.code == "ignored"}
    expected = {}
    for row in rows:
        module = whole.modules[row]
        expected[row] = module.work("forward").self_macs + module.work("backward").self_macs
    assert expected == noted


def test_a_class_is_ignored_under_every_name_that_its_modules_run_under() -> None:
    """A module that two modules share runs under two names, and is ignored under both of them."""

    class Caller(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.shared = shared

        def forward(self, x: Tensor) -> Tensor:
            return self.shared(x)

    shared = nn.Linear(4, 4)
    model = nn.Sequential(Caller(shared), Caller(shared))
    assert {"": 96, "0": 48, "0.shared": 48, "1": 48, "1.shared": 48} == lflops.count(
        model, x
    ).by_module()
    profile = lflops.count(model, x, ignore=nn.Linear)
    assert profile.total() == 0
    assert ["0.shared", "1.shared"] == [note.subject for note in profile.notes]


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_what_counting_notes_is_said_in_sentences() -> None:
    """The report has a sentence for each note of a count: for a compiled and an ignored module."""
    torch.compiler.reset()
    model = torch.compile(nn.Linear(4, 2), backend="eager")
    first, second = lflops.count(model, x, ignore=[""]).notes
    notes = {first.code: first, second.code: second}
    assert "1 compiled module was counted without compilation" in sentence(
        notes["compiled_ran_eager"]
    )
    assert not sentence(notes["ignored"]).startswith(" ")


def test_a_loop_that_fails_leaves_a_partial_profile() -> None:
    """The profile has the work until the error and is marked as partial; the error is raised."""

    def loop() -> None:
        net(x)
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"), lflops.counting(net) as counted:
        loop()
    assert counted.profile.run.partial
    assert 3 * 48 == counted.profile.total()
    with lflops.counting(net) as counted:
        net(x)
    assert not counted.profile.run.partial


def test_there_is_no_profile_before_the_end() -> None:
    """Reading the profile before or inside the `with` block raises an error."""
    counted = lflops.counting(net)
    for context in (None, counted):
        with (
            context or torch.no_grad(),
            pytest.raises(
                lflops.CountError,
                match="the profile is not available until the `with` block has ended",
            ),
        ):
            _ = counted.profile
    assert counted.profile.total() == 0


def test_a_count_counts_once() -> None:
    """Entering `counting` a second time is an error, because each loop needs a new count."""
    with lflops.counting(net) as counted:
        net(x)
    with pytest.raises(lflops.CountError, match="to create a new one"), counted:
        net(x)
    assert 3 * 48 == counted.profile.total()
