"""Generate the parts of the documentation that come from the code, and build the site.

`python docs/site_pages.py` writes the generated parts into the pages of `docs/reference/`, so that
they can also be read in the repository. A generated part stands between two comments:

    <!-- generated: chips -->
    <!-- end of generated text -->

MkDocs calls `on_files` and `on_page_markdown`. They generate the same parts again, and add the
files of the repository that pages link to.
"""

import inspect
import itertools
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
END = "<!-- end of generated text -->"
GENERATED = re.compile(rf"<!-- generated: ([\w-]+) -->\n.*?{END}", re.DOTALL)
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
    # The page has its own title. Angle brackets are no HTML here.
    body = text.split("\n", 1)[1].replace("\n### ", "\n## ")
    body = "`".join(
        part if is_code else part.replace("<", "&lt;")
        for part, is_code in zip(body.split("`"), itertools.cycle((False, True)))
    )
    return re.sub(r"^\* `--help`.*\n", "", body, flags=re.MULTILINE)


def chips() -> str:
    """A table of chips for each vendor. Figures that the vendor does not publish are dashes."""
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
            lines += ["An array of these values, in this order:", ""]
            fields = {item["title"]: item for item in definition["prefixItems"]}
        lines += ["| field | type | meaning |", "|---|---|---|"]
        lines += [
            f"| `{field}` | {kind(item)} | {item.get('description', '').replace('|', '/')} |"
            for field, item in fields.items()
        ]
        lines.append("")
    return "\n".join(lines)


def kind(schema: Any) -> str:
    """The type of a JSON schema, in Markdown."""
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


EXAMPLES: dict[str, dict[str, int]] = {
    "schedule_shrunk": {
        "batches": 12,
        "skip_first": 1,
        "wait": 2,
        "warmup": 1,
        "active": 3,
        "windows": 1,
    }
}
"""Values of the examples in the reference of the notes, for sentences that need a certain order."""


def notes() -> str:
    """For each code: its sentence with example values, its cause and its remedy."""
    from lflops.profile.notes import Note, kinds, sentence

    lines = []
    for code, row in sorted(kinds().items()):
        # Rising numbers, because sentences compare a number with one that is named after it.
        numbers = itertools.count(start=12, step=12)
        values: dict[str, int | float | str] = {}
        for name, kind in row.values.items():
            key = "forward" if name == "*" else name
            if kind is int:
                values[key] = next(numbers)
            else:
                values[key] = 0.25 if kind is float else "…"
        values |= EXAMPLES.get(code, {})
        lines += [
            f"## `{code}`",
            "",
            f"> {sentence(Note(code=code, subject='…', values=values))}",
            "",
        ]
        lines += [f"**Cause**: {row.cause} **Remedy**: {row.remedy}", ""]
    return "\n".join(lines)


def findings() -> str:
    """A table of all names, then for each: its meaning, the cost that makes it an issue, and the fix."""
    from lflops.findings.registry import all_rules

    lines = ["| name | meaning |", "|---|---|"]
    for name, rules in sorted(all_rules().items()):
        meaning, _, _ = (inspect.getdoc(type(rules[0])) or "").partition("\n")
        lines.append(f"| [`{name}`](#{name}) | {meaning} |")
    lines.append("")
    for name, rules in sorted(all_rules().items()):
        lines += [f"## `{name}`", ""]
        for rule in rules:
            if len(rules) > 1:
                lines += ["**In the whole run**" if is_about_run(rule) else "**In a step**", ""]
            lines += [inspect.getdoc(type(rule)) or "", ""]
            lines += [f"**Counts as an issue**: {issue_threshold(rule)}", ""]
            if rule.fix:
                lines += [f"**What to do**: {as_markdown(rule.fix)}.", ""]
    return "\n".join(lines)


def is_about_run(rule: Any) -> bool:
    """Whether a rule looks at the ledger of the run, and not at a step of a window."""
    from lflops.findings.run_rule import RunRule

    return isinstance(rule, RunRule)


def issue_threshold(rule: Any) -> str:
    """The cost that makes a finding an issue, and how often such a finding was right."""
    from lflops.findings.finding import track_record

    threshold = rule.threshold
    if threshold.share is None:
        return "never. The finding only shows where the time goes."
    costs = []
    if threshold.share:
        whole = "training loop's time" if is_about_run(rule) else "step"
        costs.append(f"{threshold.share * 100:g} % of the {whole}")
    if threshold.seconds:
        costs.append(f"{threshold.seconds * 1000:g} ms per step")
    text = f"if the cost is at least {' and '.join(costs)}" if costs else "always"
    if rule.right is not None:
        said = track_record(*rule.right)
        text += f". {said[0].upper()}{said[1:]}"
    return f"{text}."


def as_markdown(template: str) -> str:
    """A template with words for its placeholders, as Markdown."""
    words = {"where": "the module", "usual_dtype": "DTYPE", "cores": "CORES", "calls": "N"}
    for name, word in words.items():
        template = template.replace(f"{{{name}}}", word)
    return template.replace("<", "&lt;").replace("*", r"\*")


def names() -> str:
    """A table of the public names, each with the first sentence of its documentation."""
    import lflops.huggingface

    others = {"hardware.lookup", "tensorboard.log", "huggingface.FlopsCallback"}
    lines = ["| name | meaning | source |", "|---|---|---|"]
    for name in sorted({*lflops.__all__, *others}, key=str.lower):
        value: Any = lflops
        for part in name.split("."):
            value = getattr(value, part)
        sentence = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
        file = Path(inspect.getsourcefile(inspect.unwrap(value)) or "").relative_to(ROOT).as_posix()
        lines.append(f"| `lflops.{name}` | {sentence.replace('|', '/')} | [{file}](../../{file}) |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "chips": chips,
    "command-line": command_line,
    "findings": findings,
    "names": names,
    "notes": notes,
    "profile-file": profile_file,
}


def with_generated_text(page: str) -> str:
    """The page with its generated parts as the code has them now."""
    return GENERATED.sub(
        lambda found: f"<!-- generated: {found[1]} -->\n\n{TABLES[found[1]]().strip()}\n\n{END}",
        page,
    )


def site_path(path: str) -> str:
    """The path of a repository file in the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def links(markdown: str, path: str) -> Iterator[str]:
    """Paths of the repository files that a page links to."""
    for link in LINK.finditer(FENCE.sub("", markdown)):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1]))


def relinked(markdown: str, path: str) -> str:
    """The page, with links to files outside `docs/` changed to their paths in the site."""
    here = posixpath.dirname(site_path(path))

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1]))
        return posixpath.relpath(site_path(target), here) if (ROOT / target).is_file() else link[0]

    return LINK.sub(moved, markdown)


def linked_from_outside() -> list[str]:
    """Files outside `docs/` that pages link to, directly or through other such files."""
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
    """Add the repository files that pages link to."""
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
    """Update the generated parts, and change the links to files outside `docs/`."""
    source = page.file.src_uri
    path = (
        source.removeprefix("repository/") if source.startswith("repository/") else f"docs/{source}"
    )
    return relinked(with_generated_text(markdown), path)


def main() -> None:
    """Write the generated parts into the pages."""
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text("utf-8")
        path.write_text(with_generated_text(page), "utf-8")


if __name__ == "__main__":
    main()
