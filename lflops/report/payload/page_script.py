"""The page's modules joined into one script.

From disk modules cannot load others, and from a server one file comes sooner than forty.
"""

import posixpath
import re
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "page"
_IMPORT = re.compile(r'^import\s*(\{[^}]*\})\s*from\s*"(\.\.?/[\w/.]+)\.js";', re.MULTILINE)
_RENAMED = re.compile(r"(\w+)\s+as\s+(\w+)")
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def page_script(entry: str) -> str:
    """The module of `page/` at this path and all that it imports, as one module with the same exports."""
    # What is imported comes first. Each module is a function with its own scope, and returns what
    # it exports.
    exported = _exports(_source(entry))
    again = f"export const {{ {exported} }} = {_variable(entry)};\n" if exported else ""
    return _joined(entry, []) + again


def _joined(name: str, taken: list[str]) -> str:
    taken.append(name)
    source = _source(name)

    def module(path: str) -> str:
        return posixpath.normpath(posixpath.join(posixpath.dirname(name), path))

    def taking(statement: re.Match[str]) -> str:
        """`{ a as b }` of an import is `{ a: b }` of what the module's function returns."""
        names = _RENAMED.sub(r"\1: \2", statement[1])
        return f"const {names} = {_variable(module(statement[2]))};"

    imported = [
        _joined(each, taken)
        for each in (module(path) for _, path in _IMPORT.findall(source))
        if each not in taken
    ]
    body = _EXPORT.sub(r"\1", _IMPORT.sub(taking, source))
    return "".join(
        [
            *imported,
            f"const {_variable(name)} = (() => {{\n{body}return {{ {_exports(source)} }};\n}})();\n",
        ]
    )


def _source(name: str) -> str:
    return (_PAGE / f"{name}.js").read_text("utf-8")


def _exports(source: str) -> str:
    return ", ".join(each for _, each in _EXPORT.findall(source))


def _variable(name: str) -> str:
    return "$" + name.replace("/", "_")
