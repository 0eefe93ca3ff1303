"""Join the JavaScript modules of the page into one script.

A page that is opened from disk cannot load other files, and a server can send one file faster than
many files.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "page"
_IMPORT = re.compile(r'^import\s*(\{[^}]*\})\s*from\s*"(\.\.?/[\w/.]+)\.js";', re.MULTILINE)
_RENAMED = re.compile(r"(\w+)\s+as\s+(\w+)")
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def page_script(entry: str) -> str:
    """Join a JavaScript module and all modules that it imports into one module.

    `entry` is the path of the first JavaScript module below `page/`, without its suffix. The result
    exports the same names as `entry`. Inside the result, each module is a function that returns the
    exports of the module.
    """
    script = "".join(_functions(entry, set()))
    exported = _exports(_source(entry))
    if exported:
        script += f"export const {{ {exported} }} = {_variable(entry)};\n"
    return script


def _functions(name: str, seen: set[str]) -> Iterator[str]:
    """Yield the code of a JavaScript module and of all modules that it imports, as functions.

    Imported modules come first. Modules in `seen` are left out, because they already have a
    function.
    """
    seen.add(name)
    source = _source(name)

    def path_of(imported: str) -> str:
        return posixpath.normpath(posixpath.join(posixpath.dirname(name), imported))

    def assignment(statement: re.Match[str]) -> str:
        """Convert `import { a as b }` to an assignment that destructures a function's result."""
        names = _RENAMED.sub(r"\1: \2", statement[1])
        return f"const {names} = {_variable(path_of(statement[2]))};"

    for _, imported in _IMPORT.findall(source):
        if path_of(imported) not in seen:
            yield from _functions(path_of(imported), seen)
    body = _EXPORT.sub(r"\1", _IMPORT.sub(assignment, source))
    exports = _exports(source)
    yield f"const {_variable(name)} = (() => {{\n{body}return {{ {exports} }};\n}})();\n"


def _source(name: str) -> str:
    return (_PAGE / f"{name}.js").read_text("utf-8")


def _exports(source: str) -> str:
    return ", ".join(name for _, name in _EXPORT.findall(source))


def _variable(name: str) -> str:
    return "$" + name.replace("/", "_")
