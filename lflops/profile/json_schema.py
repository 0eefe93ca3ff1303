"""The JSON schema of what lflops writes, made from the types and their docstrings."""

import inspect
import re
from typing import Any

import msgspec

from lflops.profile import model, timeline

_ATTRIBUTE = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def json_schema(value: type = model.Profile, title: str = f"A profile of lflops, schema_version {model.SCHEMA_VERSION}") -> dict[str, Any]:
    """The schema of a value, in JSON Schema's draft 2020-12; each object and field with its description.

    It takes the files of every minor version of its major one: fields that it does not know are allowed.
    """
    schema = msgspec.json.schema(value)
    for name, definition in schema["$defs"].items():
        _describe(name, definition)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title} | schema


def _describe(name: str, definition: dict[str, Any]) -> None:
    """Divide a docstring: its text stays the object's, each line of "Attributes" goes to its field."""
    text, _, attributes = inspect.cleandoc(definition.get("description", "")).partition("Attributes:\n")
    if text:
        definition["description"] = " ".join(text.split())
    fields = definition.get("properties", {})
    if "prefixItems" in definition:  # an array, whose items are the fields of a tuple or of a struct
        kind = getattr(model, name, None) or getattr(timeline, name)
        names = kind._fields if issubclass(kind, tuple) else kind.__struct_fields__
        fields = dict(zip(names, definition["prefixItems"], strict=True))
        for field, item in fields.items():
            item["title"] = field
    for field, meaning in _ATTRIBUTE.findall(attributes):
        if field in fields:
            fields[field]["description"] = " ".join(meaning.split())
