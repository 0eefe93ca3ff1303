"""What `make docs` adds to the pages.

Tables and texts that are made from the code, and the repository's files that pages link to.

MkDocs calls `on_files` and `on_page_markdown`. A page asks for a table by a comment, as `<!--
generated: chips -->`.
"""

import inspect
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = re.compile(r"<!-- generated: ([\w-]+) -->")
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)(?=[)#])")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def command_line() -> str:
    """Every command with its arguments and options, from the help texts."""
    import typer.cli

    from lflops.cli.main import app

    command: Any = typer.main.get_command(app)
    text = typer.cli.get_docs_for_click(
        obj=command, ctx=command.context_class(command, info_name="lflops"), name="lflops"
    )
    # The page has a title of its own. What stands in angle brackets is no HTML.
    body = text.split("\n", 1)[1].replace("\n### ", "\n## ").replace("<", "&lt;")
    return re.sub(r"^\* `--help`.*\n", "", body, flags=re.MULTILINE)


def chips() -> str:
    """A table of the chips for each vendor; a figure that the vendor does not publish is a dash."""
    from lflops.hardware import chips as table

    dtypes = ("fp32", "tf32", "bf16", "fp16", "fp8")
    lines = []
    for vendor, rows in table.chips().items():
        lines += [
            f"## {vendor}",
            "",
            f"| chip | {' | '.join(dtypes)} | bandwidth | memory | source |",
            f"|---{'|--:' * 7}|---|",
        ]
        for chip in rows:
            peaks = [chip.peak_flops_per_second.get(dtype) for dtype in dtypes]
            figures = [
                *["–" if peak is None else f"{peak / 1e12:,.4g}" for peak in peaks],
                "–"
                if chip.bandwidth_bytes_per_second is None
                else f"{chip.bandwidth_bytes_per_second / 1e9:,.5g}",
                "–" if chip.memory_bytes is None else f"{chip.memory_bytes / 2**30:,.4g}",
            ]
            host = re.sub(r"^https?://(www\.)?([^/]+).*", r"\2", chip.source)
            lines.append(f"| {chip.name} | {' | '.join(figures)} | [{host}]({chip.source}) |")
        lines.append("")
    return "\n".join(lines)


def profile_file() -> str:
    """A table of fields for each object of the JSON schema."""
    from lflops.profile.json_file import json_schema

    lines = []
    for name, definition in json_schema()["$defs"].items():
        lines += [f"## {name}", "", definition.get("description", ""), ""]
        fields = definition.get("properties")
        if fields is None:
            lines += ["An array of these, in this order:", ""]
            fields = {item["title"]: item for item in definition["prefixItems"]}
        lines += ["| field | type | |", "|---|---|---|"]
        lines += [
            f"| `{field}` | {kind(item)} | {item.get('description', '').replace('|', '/')} |"
            for field, item in fields.items()
        ]
        lines.append("")
    return "\n".join(lines)


def kind(schema: Any) -> str:
    """The type that a piece of JSON schema asks for, in Markdown."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(map(kind, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f'`"{value}"`' for value in schema["enum"])
    if schema.get("type") == "array":
        return f"array of {kind(schema['items'])}" if schema.get("items") else "array"
    if schema.get("type") == "object" and "additionalProperties" in schema:
        return f"object of {kind(schema['additionalProperties'])} by name"
    return schema.get("type", "any")


def notes() -> str:
    """For each code its sentence with values of an example, its cause and its remedy."""
    from lflops.profile.notes import Note, kinds, sentence

    example: dict[type, int | float | str] = {int: 12, float: 0.25, str: "…"}
    lines = []
    for code, row in sorted(kinds().items()):
        values = {
            "forward" if name == "*" else name: example[kind] for name, kind in row.values.items()
        }
        lines += [
            f"## `{code}`",
            "",
            f"> {sentence(Note(code=code, subject='…', values=values))}",
            "",
        ]
        lines += [f"**Cause**: {row.cause} **Remedy**: {row.remedy}", ""]
    return "\n".join(lines)


def findings() -> str:
    """For each rule its name, what it means, from which cost on it is an issue, and the fix."""
    from lflops.findings.registry import all_rules

    lines = []
    for name, rules in all_rules().items():
        lines += [f"## `{name}`", ""]
        for rule in rules:
            lines += [inspect.getdoc(type(rule)) or "", ""]
        lines += [f"**Issue**: {issue_threshold(rules[0])}", ""]
        fixes = dict.fromkeys(rule.fix for rule in rules if rule.fix)
        lines += [f"**What to do**: {as_markdown(fix)}." for fix in fixes]
        lines.append("")
    return "\n".join(lines)


def issue_threshold(rule: Any) -> str:
    """From which cost on a finding is an issue, and how often such a finding was right."""
    threshold = rule.threshold
    if threshold.share is None:
        return "never; it only says where the time goes."
    text = "always" if threshold.share == 0 else f"from {threshold.share * 100:g} % of the time on"
    if threshold.seconds:
        text += f", if it costs at least {threshold.seconds * 1000:g} ms per step"
    if rule.right is not None:
        right, total = rule.right
        text += f". Right in {right} of {total} training runs with known issues"
    return f"{text}."


def as_markdown(template: str) -> str:
    """A template with its placeholders in words, as Markdown."""
    words = {"where": "the module", "usual_dtype": "DTYPE", "cores": "CORES"}
    for name, word in words.items():
        template = template.replace(f"{{{name}}}", word)
    return template.replace("<", "&lt;").replace("*", r"\*")


TABLES: dict[str, Callable[[], str]] = {
    "chips": chips,
    "command-line": command_line,
    "findings": findings,
    "notes": notes,
    "profile-file": profile_file,
}


def site_path(path: str) -> str:
    """Where a file of the repository is in the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def links(markdown: str, path: str) -> Iterator[str]:
    """The files of the repository that a page links to, by their paths in it."""
    for link in LINK.finditer(FENCE.sub("", markdown)):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1]))


def relinked(markdown: str, path: str) -> str:
    """The page with the links to files outside of `docs/` as they are in the site."""
    here = posixpath.dirname(site_path(path))

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1]))
        return posixpath.relpath(site_path(target), here) if (ROOT / target).is_file() else link[0]

    return LINK.sub(moved, markdown)


def linked_from_outside() -> list[str]:
    """The files outside of `docs/` that a page links to, and those that these link to."""
    waiting = [path.relative_to(ROOT).as_posix() for path in sorted(DOCS.rglob("*.md"))]
    found: list[str] = []
    while waiting:
        path = waiting.pop()
        if not path.endswith(".md"):
            continue
        for target in links((ROOT / path).read_text("utf-8"), path):
            if not target.startswith("docs/") and target not in found and (ROOT / target).is_file():
                found.append(target)
                waiting.append(target)
    return found


def on_files(files: Any, *, config: Any) -> Any:
    """Add the files that pages link to."""
    from mkdocs.structure.files import File, InclusionLevel

    for path in linked_from_outside():
        file = File.generated(
            config,
            site_path(path),
            content=(ROOT / path).read_text("utf-8"),
            inclusion=InclusionLevel.NOT_IN_NAV,
        )
        files.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Put in what is generated, and change the links to files outside of `docs/`."""
    source = page.file.src_uri
    path = (
        source.removeprefix("repository/") if source.startswith("repository/") else f"docs/{source}"
    )
    return GENERATED.sub(lambda found: TABLES[found[1]](), relinked(markdown, path))
