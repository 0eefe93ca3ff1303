"""`lflops schema`: the JSON schema of a profile's file."""

from lflops.cli.output import write_json
from lflops.profile.json_schema import json_schema

__all__ = ["schema"]


def schema() -> None:
    """Print the JSON schema of a profile's file."""
    write_json(json_schema())
