"""Check `lflops schema` with the independent validator `jsonschema`."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from msgspec import Struct

import lflops
from lflops.cli.main import main
from lflops.hardware.chips import lookup
from lflops.profile.json_file import json_schema
from tests.support import profile_builders


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """Return the schema as a reader of its JSON text sees it."""
    return json.loads(json.dumps(json_schema()))


def saved(profile: lflops.Profile, folder: Path) -> Any:
    """Save a profile and return the content of its file."""
    profile.save(folder / "profile.json")
    return json.loads((folder / "profile.json").read_text("utf-8"))


def test_it_is_a_schema_and_printed_by_the_shell(
    schema: dict[str, Any], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """The schema is valid in the draft that it names, and `lflops schema` prints it."""
    jsonschema.Draft202012Validator.check_schema(schema)
    assert 0 == main(["schema"])
    assert schema == json.loads(capfdbinary.readouterr().out)


def test_a_real_profile_is_valid(schema: dict[str, Any], tmp_path: Path) -> None:
    """A measured profile with times, memory and a chip matches the schema."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    profile = lflops.measure(
        model, torch.randn(3, 4), backward=True, warmup=0, repeats=1, hardware=lookup("NVIDIA H200")
    )
    jsonschema.validate(saved(profile, tmp_path), schema)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["run", "world_size"], -1),
        (["run", "kind"], "guess"),
        (["modules", "", "forward", "macs"], 1.5),
        (["modules", "", "forward"], None),
        (["op_counts", 0, "phase"], "sideways"),
        (["memory", "timeline", 0, 3], "many"),
        (["schema_version"], 1),
    ],
)
def test_a_wrong_value_is_refused_as_load_refuses_it(
    path: list[Any], value: object, schema: dict[str, Any], tmp_path: Path
) -> None:
    """The schema and `load` both refuse each wrong value."""
    content = saved(lflops.count(torch.nn.Linear(4, 8), torch.randn(3, 4)), tmp_path)
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "wrong.json").write_text(json.dumps(content), "utf-8")
    with pytest.raises(lflops.ProfileError):
        lflops.load(tmp_path / "wrong.json")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, schema)


def test_a_field_of_a_later_minor_version_is_taken(schema: dict[str, Any], tmp_path: Path) -> None:
    """The schema accepts an unknown field, as `load` does."""
    content = saved(lflops.count(torch.nn.Linear(4, 8), torch.randn(3, 4)), tmp_path)
    content["run"]["colour"] = "green"
    jsonschema.validate(content, schema)


def test_each_field_of_a_docstring_is_described(schema: dict[str, Any]) -> None:
    """Descriptions come from docstrings, for properties of objects and for items of arrays."""
    assert "Facts about the profiled run" in schema["$defs"]["Run"]["description"]
    assert schema["$defs"]["Work"]["properties"]["macs"]["description"].startswith(
        "Multiply-accumulates"
    )
    moment = schema["$defs"]["Moment"]["prefixItems"]
    assert list(profile_builders.Moment.__struct_fields__) == [item["title"] for item in moment]
    assert any("most bytes that were alive" in item.get("description", "") for item in moment)


def undescribed(schema: dict[str, Any]) -> list[str]:
    """Fields of a schema's definitions that have no description, such as `Run.kind`."""
    missing = []
    for name, definition in schema["$defs"].items():
        fields = definition.get("properties")
        if fields is None:
            fields = {item["title"]: item for item in definition["prefixItems"]}
        for field, item in fields.items():
            if not item.get("description"):
                missing.append(f"{name}.{field}")
    return missing


def test_every_field_is_described(schema: dict[str, Any]) -> None:
    """No field lacks a description: the reference page of the profile file shows all of them."""
    assert [] == undescribed(schema)


class Inner(Struct):
    """A class without descriptions of its fields."""

    third: int


class Outer(Struct):
    """A class that describes only one of its fields.

    Attributes:
        first: The only field with a description.
    """

    first: int
    second: Inner


def test_a_field_without_a_description_is_found() -> None:
    """`undescribed` finds fields without a description in objects and in arrays."""
    assert ["Outer.second", "Inner.third"] == undescribed(json_schema(Outer, "twin"))
    array = {"prefixItems": [{"title": "described", "description": "A."}, {"title": "bare"}]}
    assert ["Array.bare"] == undescribed({"$defs": {"Array": array}})
