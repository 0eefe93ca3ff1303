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
    """Who is who."""
    pairs = matched(compared_run(before), compared_run(after))
    assert len({one for one, _ in pairs if one}) == sum(one is not None for one, _ in pairs)
    return {
        one.name if one else f"+{other.name}" if other else None: other.name if other else None
        for one, other in pairs
    }


def of(*modules: str, macs: Mapping[str, int] | None = None, **kinds: str) -> Profile:
    """Modules by their names, with classes by their labels."""
    return ran(
        dict.fromkeys(modules, 1e-3),
        macs=macs,
        kinds={name: kinds.get(name.rpartition(".")[2], "Linear") for name in modules},
    )


class Perceptron(nn.Module):
    """Two layers under the names that are given."""

    def __init__(self, *labels: str) -> None:
        super().__init__()
        for label, layer in zip(labels, (nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), strict=True):
            self.add_module(label, layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


class Model(nn.Module):
    """Two perceptrons and a head."""

    def __init__(self, *labels: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Perceptron(*labels), Perceptron(*labels))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class Wrapper(nn.Module):
    """As DDP, Fabric, FSDP and torch.compile register what they wrap."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)

    def forward(self, x: Tensor) -> Tensor:
        (inner,) = self.children()
        return inner(x)


class Lit(nn.Module):
    """As a LightningModule is often made: the model in an attribute, and a loss beside it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model, self.criterion = inner, nn.MSELoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.criterion(self.model(x), torch.zeros(3, 2))


def counted(model: nn.Module) -> Profile:
    """One forward."""
    return lflops.count(model, torch.ones(3, 4))


PLAIN = ("fc1", "act", "fc2")
SAME = [
    "",
    "blocks",
    *(f"blocks.{i}{label}" for i in range(2) for label in ("", ".fc1", ".act", ".fc2")),
    "head",
]


@pytest.mark.parametrize(
    "wrapper", ["module", "_orig_mod", "_fsdp_wrapped_module", "_forward_module"]
)
def test_a_wrapper_is_seen_through(wrapper: str) -> None:
    """The model in it is the model, either way round."""
    plain, wrapped = counted(Model(*PLAIN)), counted(Wrapper(wrapper, Model(*PLAIN)))
    level = (
        "" if wrapper in {"_orig_mod", "_fsdp_wrapped_module"} else f"{wrapper}."
    )  # of torch's own wrappers a profile has no level
    assert {name: name and f"{level}{name}" for name in SAME} == names(plain, wrapped)
    assert {name and f"{level}{name}": name for name in SAME} == names(wrapped, plain)


def test_wrappers_within_wrappers_and_blocks_are_seen_through() -> None:
    """DDP around Fabric's module; every block in one of its own."""
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
    """The root's own product is the same in DDP, whose own is none."""

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
    """Compiled and eager."""
    assert {name: name for name in SAME} == names(
        counted(Model(*PLAIN)), counted(torch.compile(Model(*PLAIN), backend="eager"))
    )


def test_a_lightning_module_is_the_model_that_it_holds() -> None:
    """The loss is added; the root is the root."""
    expected = (
        {"": ""} | {name: f"model.{name}" for name in SAME if name} | {"+criterion": "criterion"}
    )
    assert expected == names(counted(Model(*PLAIN)), counted(Lit(Model(*PLAIN))))
    assert {"": "", "model.head": "head", "criterion": None}.items() <= names(
        counted(Lit(Model(*PLAIN))), counted(Model(*PLAIN))
    ).items()


def test_renamed_attributes_are_found_by_what_they_are() -> None:
    """Each layer has another name, in each block."""
    found = names(counted(Model(*PLAIN)), counted(Model("up", "gelu", "down")))
    assert ("blocks.0.up", "blocks.0.gelu", "blocks.0.down", "blocks.1.down") == tuple(
        found[name] for name in ("blocks.0.fc1", "blocks.0.act", "blocks.0.fc2", "blocks.1.fc2")
    )


def test_renamed_modules_that_are_alike_keep_their_order() -> None:
    """q, k and v; what is below a renamed block goes with it."""
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
    """Two Linears, twice as wide: the first is the first.

    Of three nobody knows which of them are the two.
    """
    wide = dict.fromkeys(("c", "d", "e"), 200)
    assert {"": "", "a": "c", "b": "d"} == names(of("a", "b"), of("c", "d", macs=wide))
    assert {"": "", "a": None, "b": None, "+c": "c", "+d": "d", "+e": "e"} == names(
        of("a", "b"), of("c", "d", "e", macs=wide)
    )


def test_a_module_of_another_class_in_its_place_is_the_same() -> None:
    """A LayerNorm that became an RMSNorm."""
    assert {"": "", "norm": "norm", "fc": "fc"} == names(
        of("norm", "fc", norm="LayerNorm"), of("norm", "fc", norm="RMSNorm")
    )


def test_a_module_put_in_at_the_beginning_moves_the_others_on() -> None:
    """In a Sequential the numbers change: the work tells who is who."""
    widths = {"0": 10, "1": 20}
    found = names(of("0", "1", macs=widths), of("0", "1", "2", macs={"0": 5, "1": 10, "2": 20}))
    assert {"": "", "0": "1", "1": "2", "+0": "0"} == found


def test_added_and_removed_modules_are_told() -> None:
    """An adapter with two parts comes, the pooler goes."""
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
    """Every block is put into a module of one's own, and the head into another; these two are new."""
    before = of(
        "blocks.0.attention",
        "blocks.0.mlp",
        "blocks.1.attention",
        "blocks.1.mlp",
        "head",
        head="Head",
    )
    after = of(
        *(f"blocks.{i}.inner.{part}" for i in range(2) for part in ("attention", "mlp")),
        "top.head",
        head="Head",
    )
    found = names(before, after)
    assert ("blocks.0.inner.mlp", "blocks.1.inner.attention", "top.head") == tuple(
        found[name] for name in ("blocks.0.mlp", "blocks.1.attention", "head")
    )
    assert {"+blocks.0.inner", "+blocks.1.inner", "+top"} == {
        name for name in found if name and name.startswith("+")
    }


def test_a_name_says_more_than_the_work() -> None:
    """The head is larger, and something new is as large as it was."""
    assert {"": "", "head": "head", "+adapter": "adapter"} == names(
        of("head"), of("head", "adapter", macs={"head": 150})
    )
