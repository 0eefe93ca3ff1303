"""Test the file of the page: its data, its script, its policy, and the command `lflops html`."""

import base64
import hashlib
import os
import re
import zlib
from pathlib import Path

import pytest
from msgspec import json

from lflops.analysis.analysis import analyze
from lflops.cli.main import main
from lflops.profile.json_file import save
from lflops.profile.profile import Profile
from lflops.report.html import page
from lflops.report.payload.payload import payload
from tests.support.malicious_names import IMAGE, SCRIPT, hostile_profile
from tests.support.profile_builders import small_profile
from tests.support.repository import ROOT

PARTS = ROOT / "lflops" / "page"


def held(text: str) -> object:
    """Return the payload that a page contains."""
    found = re.search(
        r'<script type="text/plain" id="data" data-head="[^"]*">([^<]*)</script>', text
    )
    assert found
    return json.decode(zlib.decompress(base64.b64decode(found[1])))


def sources() -> dict[str, str]:
    """Return the source of all modules of the page by file name."""
    return {path.name: path.read_text("utf-8") for path in sorted(PARTS.rglob("*.js"))}


def writes_markup(source: str) -> list[str]:
    """Return all expressions of a source that would treat text as HTML or as code."""
    return re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
        r"|DOMParser",
        source,
    )


@pytest.mark.parametrize("given", [small_profile(), hostile_profile()], ids=["small", "hostile"])
def test_the_page_holds_its_payload(given: Profile) -> None:
    """The page contains its whole payload as data, so no name appears unescaped in the document."""
    text = page(analyze(given))
    assert json.decode(json.encode(payload(analyze(given)))) == held(text)
    assert IMAGE not in text
    assert SCRIPT not in text


def test_the_page_asks_for_nothing() -> None:
    """The page requests nothing, and its policy allows only its own script.

    The only address is the namespace of SVG. The script has no import left, and the policy has its
    hash.
    """
    text = page(analyze(small_profile()))
    requests = re.findall(r"https?://[^\"]*|^import |^export ", text, re.MULTILINE)
    assert {"http://www.w3.org/2000/svg"} == set(requests)
    script = re.search(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    assert script
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; img-src data:"
    )
    assert policy in text


def test_modules_stand_in_one_script_each_with_names_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All modules of the page become one script, in the order of their dependencies.

    Each module has its own scope: two modules have a variable `kept`. A module that is imported
    twice appears once.
    """
    sources = {
        "entry/offline": (
            'import { a } from "../lib/a.js";\nimport { b } from "../lib/b.js";\n\na(b);\n'
        ),
        "lib/a": (
            'import { b } from "./b.js";\n\nconst kept = b;\n\n'
            "export function a() {\n  return kept;\n}\n"
        ),
        "lib/b": "const kept = 1;\n\nexport const b = kept;\n",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.js").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.js").write_text(source)
    (tmp_path / "shell").mkdir()
    (tmp_path / "shell" / "style.css").touch()
    monkeypatch.setattr("lflops.report.payload.page_script._PAGE", tmp_path)
    text = page(analyze(small_profile()))
    script = re.search(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    assert script
    assert (
        "const $lib_b = (() => {\nconst kept = 1;\n\nconst b = kept;\nreturn { b };\n})();\n"
        "const $lib_a = (() => {\nconst { b } = $lib_b;\n\nconst kept = b;\n\n"
        "function a() {\n  return kept;\n}\nreturn { a };\n})();\n"
        "const $entry_offline = (() => {\nconst { a } = $lib_a;\nconst { b } = $lib_b;\n\n"
        "a(b);\nreturn {  };\n})();\n"
    ) == script[1]


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ('import { b } from "../lib/b.js";', "const { b } = $lib_b;"),
        ('import {\n  b,\n  other,\n} from "../lib/b.js";', "const {\n  b,\n  other,\n} = $lib_b;"),
        ('import { b,\n  other }\n  from "../lib/b.js";', "const { b,\n  other } = $lib_b;"),
        ('import { b as c, other } from "../lib/b.js";', "const { b: c, other } = $lib_b;"),
        (
            'import {\n  b\n    as c,\n} from "../lib/b.js"; // why',
            "const {\n  b: c,\n} = $lib_b; // why",
        ),
    ],
)
def test_an_import_may_be_written_over_lines_and_give_other_names(
    statement: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports may have line breaks, several names and renames with `as`, as in JavaScript."""
    for folder in ("entry", "lib", "shell"):
        (tmp_path / folder).mkdir()
    (tmp_path / "entry" / "offline.js").write_text(f"{statement}\n")
    (tmp_path / "lib" / "b.js").write_text("export const b = 1;\nexport const other = 2;\n")
    (tmp_path / "shell" / "style.css").touch()
    monkeypatch.setattr("lflops.report.payload.page_script._PAGE", tmp_path)
    b = "const $lib_b = (() => {\nconst b = 1;\nconst other = 2;\nreturn { b, other };\n})();\n"
    entry = f"const $entry_offline = (() => {{\n{expected}\nreturn {{  }};\n}})();\n"
    script = f'<script type="module">{b}{entry}</script>'
    assert script in page(analyze(small_profile()))


def test_no_module_writes_markup() -> None:
    """No module treats text as HTML or code, so text from a run stays text."""
    for name, source in sources().items():
        assert [] == writes_markup(source), name


def test_written_markup_would_be_seen() -> None:
    """Two planted expressions are found, so the test above can fail."""
    source = "node.innerHTML = name; eval(name); evaluate(name)"
    assert ["innerHTML", "eval("] == writes_markup(source)


def test_html_writes_the_page_beside_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page is written next to the profile, or to the path of `-o`, and its path is printed."""
    file = tmp_path / "small.profile.json"
    save(small_profile(), file)
    for arguments, place in (
        ([], "small.profile.html"),
        (["-o", str(tmp_path / "new" / "page.html")], "new/page.html"),
    ):
        assert 0 == main(["html", str(file), *arguments])
        assert f"{tmp_path / place}\n" == capsys.readouterr().out
        assert page(analyze(small_profile())) == (tmp_path / place).read_text("utf-8")


def test_a_pipe_with_the_default_name_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a pipe has the default name, the command fails instead of waiting for a reader."""
    file = tmp_path / "small.profile.json"
    save(small_profile(), file)
    os.mkfifo(tmp_path / "small.profile.html")
    assert main(["html", str(file)]) == 2
    assert "not a regular file, but a folder, a pipe or a device" in capsys.readouterr().err
    # The user may name a device as the output.
    assert main(["html", str(file), "-o", os.devnull]) == 0


def test_html_puts_several_profiles_into_one_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several profiles share a page, in their order, each with a name to choose it by.

    This is the name of the file, or its path if the names are equal.
    """
    (tmp_path / "old").mkdir()
    first = tmp_path / "a.json"
    second = tmp_path / "b.json"
    old_second = tmp_path / "old/b.json"
    for file in (first, second, old_second):
        save(small_profile(), file)
    for given, names in (
        ([first, second], ["a.json", "b.json"]),
        ([second, old_second], [str(second), str(old_second)]),
    ):
        assert 0 == main(["html", *map(str, given)])
        place = given[-1].with_suffix(".compare.html")
        assert f"{place}\n" == capsys.readouterr().out
        found = re.findall(
            r'<script type="text/plain" id="data1?" data-run="([^"]*)" data-tag="fit" '
            'data-step="8" data-head=',
            place.read_text("utf-8"),
        )
        assert names == found
    # A file that is given twice is numbered.
    twice = tmp_path / "twice.html"
    assert 0 == main(["html", str(first), str(first), "-o", str(twice)])
    assert f'data-run="{first} (2)"' in twice.read_text("utf-8")


def test_html_prints_what_it_would_draw(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """`--json` prints the payload, or a list for several profiles, and writes no file."""
    file = tmp_path / "small.profile.json"
    save(small_profile(), file)
    shown = json.decode(json.encode(payload(analyze(small_profile()))))
    assert 0 == main(["html", str(file), "--json"])
    assert shown == json.decode(capsysbinary.readouterr().out)
    assert 0 == main(["html", str(file), str(file), "--json"])
    assert [shown, shown] == json.decode(capsysbinary.readouterr().out)
    assert [file] == list(tmp_path.iterdir())


def test_html_refuses_what_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page cannot replace its profile, `--json` excludes `-o`, and a missing profile is named."""
    file = tmp_path / "small.profile.json"
    save(small_profile(), file)
    before = file.read_bytes()
    assert 2 == main(["html", str(file), "-o", str(file)])
    assert "is one of the profiles" in capsys.readouterr().err
    assert before == file.read_bytes()
    assert 2 == main(["html", str(file), "--json", "-o", "x.html"])
    assert 2 == main(["html", str(tmp_path / "none.json")])
    assert "none.json" in capsys.readouterr().err
