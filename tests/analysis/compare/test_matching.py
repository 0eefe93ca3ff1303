"""Test which modules of two runs are paired, although they were wrapped, renamed or moved."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import lflops
from lflops.analysis.compare.compared_run import compared_run
from lflops.analysis.compare.diff import matched
from lflops.profile.profile import Profile
from tests.support.profile_pairs import ran


def names(before: Profile, after: Profile) -> dict[str | None, str | None]:
    """Return the pairs of module names, each from the first to the second run.

    A module that only the first run has is paired with `None`. A module that only the second run
    has gets the key `+name`.
    """
    pairs = matched(compared_run(before), compared_run(after))
    found: dict[str | None, str | None] = {}
    firsts = []
    for one, other in pairs:
        if one is not None:
            firsts.append(one)
            found[one.name] = other.name if other else None
        elif other is not None:
            found[f"+{other.name}"] = other.name
        else:
            found[None] = None
    # No module of the first run is paired twice.
    assert len(set(firsts)) == len(firsts)
    return found


def of(*modules: str, macs: Mapping[str, int] | None = None, **kinds: str) -> Profile:
    """Return a run with these modules.

    `kinds` are the classes of modules, by the last part of their names. The default is Linear.
    """
    return ran(
        dict.fromkeys(modules, 1e-3),
        macs=macs,
        kinds={name: kinds.get(name.rpartition(".")[2], "Linear") for name in modules},
    )


class Perceptron(nn.Module):
    """Two Linears and a GELU between them, with these attribute names."""

    def __init__(self, *labels: str) -> None:
        super().__init__()
        for label, layer in zip(labels, (nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), strict=True):
            self.add_module(label, layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


class Model(nn.Module):
    """Two blocks and a head. `labels` are the attribute names in each block."""

    def __init__(self, *labels: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Perceptron(*labels), Perceptron(*labels))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class Wrapper(nn.Module):
    """A wrapper that has its module in an attribute, as DDP, Fabric, FSDP and torch.compile do."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)

    def forward(self, x: Tensor) -> Tensor:
        (inner,) = self.children()
        return inner(x)


class Lit(nn.Module):
    """A typical LightningModule, with the model in one attribute and the loss in another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model = inner
        self.criterion = nn.MSELoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.criterion(self.model(x), torch.zeros(3, 2))


def counted(model: nn.Module) -> Profile:
    """Return the profile of one forward pass."""
    return lflops.count(model, torch.ones(3, 4))


PLAIN = ("fc1", "act", "fc2")
SAME = [
    "",
    "blocks",
    "blocks.0",
    "blocks.0.fc1",
    "blocks.0.act",
    "blocks.0.fc2",
    "blocks.1",
    "blocks.1.fc1",
    "blocks.1.act",
    "blocks.1.fc2",
    "head",
]
"""The module names of `Model(*PLAIN)`."""


@pytest.mark.parametrize(
    "wrapper", ["module", "_orig_mod", "_fsdp_wrapped_module", "_forward_module"]
)
def test_a_wrapper_is_seen_through(wrapper: str) -> None:
    """A wrapped model is paired with the plain model, whichever of them comes first."""
    plain = counted(Model(*PLAIN))
    wrapped = counted(Wrapper(wrapper, Model(*PLAIN)))
    # A profile leaves out the wrappers of torch.compile and FSDP.
    level = "" if wrapper in {"_orig_mod", "_fsdp_wrapped_module"} else f"{wrapper}."
    in_wrapped = {name: f"{level}{name}" if name else "" for name in SAME}
    assert in_wrapped == names(plain, wrapped)
    assert {inner: name for name, inner in in_wrapped.items()} == names(wrapped, plain)


def test_wrappers_within_wrappers_and_blocks_are_seen_through() -> None:
    """Nested wrappers are paired: DDP around a Fabric module, and another one around each block."""
    model = Model(*PLAIN)
    model.blocks = nn.Sequential(*(Wrapper("module", block) for block in model.blocks))
    found = names(
        counted(Model(*PLAIN)), counted(Wrapper("module", Wrapper("_forward_module", model)))
    )
    assert ("module._forward_module.blocks.1", "module._forward_module.blocks.1.module.fc2") == (
        found["blocks.1"],
        found["blocks.1.fc2"],
    )
    assert None not in found.values()


def test_own_work_of_what_is_wrapped_is_the_wrappers() -> None:
    """The work of the wrapper's root is the work of the wrapped root, so nothing differs.

    The wrapped module computes a matmul of 3 * 4 * 3 MACs itself, and the wrapper computes nothing.
    """

    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.T

    root = lflops.diff(counted(Product()), counted(Wrapper("module", Product()))).modules[0]
    assert (3 * 4 * 3, 3 * 4 * 3, False) == (
        root.self_work.macs.before,
        root.self_work.macs.after,
        root.inclusive.differs,
    )


def test_a_compiled_model_is_the_model() -> None:
    """A compiled model has the same pairs as an eager model."""
    assert {name: name for name in SAME} == names(
        counted(Model(*PLAIN)), counted(torch.compile(Model(*PLAIN), backend="eager"))
    )


def test_a_lightning_module_is_the_model_that_it_holds() -> None:
    """A model is paired with the LightningModule that holds it, in which the loss is new."""
    expected = {"": ""}
    expected |= {name: f"model.{name}" for name in SAME if name}
    expected |= {"+criterion": "criterion"}
    assert expected == names(counted(Model(*PLAIN)), counted(Lit(Model(*PLAIN))))
    assert {"": "", "model.head": "head", "criterion": None}.items() <= names(
        counted(Lit(Model(*PLAIN))), counted(Model(*PLAIN))
    ).items()


def test_renamed_attributes_are_found_by_what_they_are() -> None:
    """Layers with other names are paired by their classes and work."""
    found = names(counted(Model(*PLAIN)), counted(Model("up", "gelu", "down")))
    assert "blocks.0.up" == found["blocks.0.fc1"]
    assert "blocks.0.gelu" == found["blocks.0.act"]
    assert "blocks.0.down" == found["blocks.0.fc2"]
    assert "blocks.1.down" == found["blocks.1.fc2"]


def test_renamed_modules_that_are_alike_keep_their_order() -> None:
    """Equal modules of a renamed block, such as q, k and v, are paired in their order."""
    found = names(
        of("attention.q", "attention.k", "attention.v"),
        of("mixer.query", "mixer.key", "mixer.value"),
    )
    expected = {
        "": "",
        "attention": "mixer",
        "attention.q": "mixer.query",
        "attention.k": "mixer.key",
        "attention.v": "mixer.value",
    }
    assert expected == found


def test_renamed_modules_with_other_work_are_found_where_there_are_as_many() -> None:
    """Two Linears that are renamed and twice as large are paired in their order.

    If there are three new Linears, it is unknown which of them are the old ones.
    """
    wide = dict.fromkeys(("c", "d", "e"), 200)
    assert {"": "", "a": "c", "b": "d"} == names(of("a", "b"), of("c", "d", macs=wide))
    assert {"": "", "a": None, "b": None, "+c": "c", "+d": "d", "+e": "e"} == names(
        of("a", "b"), of("c", "d", "e", macs=wide)
    )


def test_a_module_of_another_class_in_its_place_is_the_same() -> None:
    """Modules with the same name are paired, even if a LayerNorm became an RMSNorm."""
    assert {"": "", "norm": "norm", "fc": "fc"} == names(
        of("norm", "fc", norm="LayerNorm"), of("norm", "fc", norm="RMSNorm")
    )


def test_a_module_put_in_at_the_beginning_moves_the_others_on() -> None:
    """A new first module of a Sequential changes all numbers. Modules are paired by their work."""
    widths = {"0": 10, "1": 20}
    found = names(of("0", "1", macs=widths), of("0", "1", "2", macs={"0": 5, "1": 10, "2": 20}))
    assert {"": "", "0": "1", "1": "2", "+0": "0"} == found


def test_added_and_removed_modules_are_told() -> None:
    """The added adapter with two parts and the removed pooler are listed."""
    found = lflops.diff(
        of("encoder.fc", "pooler", pooler="Pool"),
        of("encoder.fc", "encoder.adapter.up", "encoder.adapter.down"),
    )
    assert ["encoder.adapter", "encoder.adapter.up", "encoder.adapter.down"] == [
        module.after for module in found.added
    ]
    assert ["pooler"] == [module.before for module in found.removed]
    assert (100, None) == (
        found.removed[0].self_work.macs.before,
        found.removed[0].self_work.macs.after,
    )
    assert (None, 100) == (
        found.added[1].self_work.macs.before,
        found.added[1].self_work.macs.after,
    )


def test_modules_that_moved_are_found_elsewhere() -> None:
    """Modules that are moved into new modules are paired, and only the new modules are added.

    The parts of each block are moved into `inner`, and the head into `top`.
    """
    before = of(
        "blocks.0.attention",
        "blocks.0.mlp",
        "blocks.1.attention",
        "blocks.1.mlp",
        "head",
        head="Head",
    )
    after = of(
        "blocks.0.inner.attention",
        "blocks.0.inner.mlp",
        "blocks.1.inner.attention",
        "blocks.1.inner.mlp",
        "top.head",
        head="Head",
    )
    found = names(before, after)
    assert "blocks.0.inner.mlp" == found["blocks.0.mlp"]
    assert "blocks.1.inner.attention" == found["blocks.1.attention"]
    assert "top.head" == found["head"]
    added = {name for name in found if name and name.startswith("+")}
    assert {"+blocks.0.inner", "+blocks.1.inner", "+top"} == added


def test_a_name_says_more_than_the_work() -> None:
    """A larger head is paired by its name, although a new module has the work of the old head."""
    assert {"": "", "head": "head", "+adapter": "adapter"} == names(
        of("head"), of("head", "adapter", macs={"head": 150})
    )
