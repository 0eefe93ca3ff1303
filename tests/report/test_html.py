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
    """The data that a page has in it."""
    found = re.search(
        r'<script type="text/plain" id="data" data-head="[^"]*">([^<]*)</script>', text
    )
    assert found
    return json.decode(zlib.decompress(base64.b64decode(found[1])))


def sources() -> dict[str, str]:
    """The page's modules."""
    return {path.name: path.read_text("utf-8") for path in sorted(PARTS.rglob("*.js"))}


def writes_markup(source: str) -> list[str]:
    """What would take a text for markup or for code."""
    return re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|DOMParser",
        source,
    )


@pytest.mark.parametrize("given", [small_profile(), hostile_profile()], ids=["small", "hostile"])
def test_the_page_holds_its_payload(given: Profile) -> None:
    """All of it, and as data: no name of the profile's is in the document as it is."""
    text = page(analyze(given))
    assert json.decode(json.encode(payload(analyze(given)))) == held(text)
    assert IMAGE not in text
    assert SCRIPT not in text


def test_the_page_asks_for_nothing() -> None:
    """No address but the name of SVG, no module left to load, and a policy that lets its one script run and nothing be fetched."""
    text = page(analyze(small_profile()))
    assert {"http://www.w3.org/2000/svg"} == set(
        re.findall(r"https?://[^\"]*|^import |^export ", text, re.MULTILINE)
    )
    script = re.search(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    assert script
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
        in text
    )


def test_modules_stand_in_one_script_each_with_names_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two keep something under one name, one is imported twice.

    They come in the order in which they need each other.
    """
    sources = {
        "entry/offline": 'import { a } from "../lib/a.js";\nimport { b } from "../lib/b.js";\n\na(b);\n',
        "lib/a": 'import { b } from "./b.js";\n\nconst kept = b;\n\nexport function a() {\n  return kept;\n}\n',
        "lib/b": "const kept = 1;\n\nexport const b = kept;\n",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.js").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.js").write_text(source)
    (tmp_path / "shell").mkdir()
    (tmp_path / "shell" / "style.css").touch()
    monkeypatch.setattr("lflops.report.payload.page_script._PAGE", tmp_path)
    script = re.search(
        r'<script type="module">(.*?)</script>', page(analyze(small_profile())), re.DOTALL
    )
    assert script
    assert (
        "const $lib_b = (() => {\nconst kept = 1;\n\nconst b = kept;\nreturn { b };\n})();\n"
        "const $lib_a = (() => {\nconst { b } = $lib_b;\n\nconst kept = b;\n\nfunction a() {\n  return kept;\n}\nreturn { a };\n})();\n"
        "const $entry_offline = (() => {\nconst { a } = $lib_a;\nconst { b } = $lib_b;\n\na(b);\nreturn {  };\n})();\n"
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
    """As JavaScript takes it."""
    for folder in ("entry", "lib", "shell"):
        (tmp_path / folder).mkdir()
    (tmp_path / "entry" / "offline.js").write_text(f"{statement}\n")
    (tmp_path / "lib" / "b.js").write_text("export const b = 1;\nexport const other = 2;\n")
    (tmp_path / "shell" / "style.css").touch()
    monkeypatch.setattr("lflops.report.payload.page_script._PAGE", tmp_path)
    b = "const $lib_b = (() => {\nconst b = 1;\nconst other = 2;\nreturn { b, other };\n})();\n"
    assert (
        f'<script type="module">{b}const $entry_offline = (() => {{\n{expected}\nreturn {{  }};\n}})();\n</script>'
        in page(analyze(small_profile()))
    )


def test_no_module_writes_markup() -> None:
    """What comes from a run is text in the document."""
    assert {} == {
        name: found for name, source in sources().items() if (found := writes_markup(source))
    }


def test_written_markup_would_be_seen() -> None:
    """The check above can fail."""
    assert ["innerHTML", "eval("] == writes_markup(
        "node.innerHTML = name; eval(name); evaluate(name)"
    )


def test_html_writes_the_page_beside_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or where --out says, folders and all; it says where."""
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
    """Nothing reads from it, so the command would hang."""
    file = tmp_path / "small.profile.json"
    save(small_profile(), file)
    os.mkfifo(tmp_path / "small.profile.html")
    assert main(["html", str(file)]) == 2
    assert "is a folder, a pipe or a device" in capsys.readouterr().err
    # The twin is a device that the user names.
    assert main(["html", str(file), "-o", os.devnull]) == 0


def test_html_puts_several_profiles_into_one_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In their order, each with what it is chosen by.

    The file's name, or its path where names are the same.
    """
    files = [tmp_path / name for name in ("a.json", "b.json", "old/b.json")]
    files[2].parent.mkdir()
    for file in files:
        save(small_profile(), file)
    for given, names in (
        (files[:2], ["a.json", "b.json"]),
        (files[1:], [str(file) for file in files[1:]]),
    ):
        assert 0 == main(["html", *map(str, given)])
        place = given[-1].with_suffix(".compare.html")
        assert f"{place}\n" == capsys.readouterr().out
        found = re.findall(
            r'<script type="text/plain" id="data1?" data-run="([^"]*)" data-tag="fit" data-step="8" data-head=',
            place.read_text("utf-8"),
        )
        assert names == found
    assert 0 == main(["html", str(files[0]), str(files[0]), "-o", str(tmp_path / "twice.html")])
    assert f'data-run="{files[0]} (2)"' in (tmp_path / "twice.html").read_text("utf-8")


def test_html_prints_what_it_would_draw(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """With --json, and writes nothing; of several a list."""
    file = tmp_path / "small.profile.json"
    save(small_profile(), file)
    shown = json.decode(json.encode(payload(analyze(small_profile()))))
    for files, expected in (1, shown), (2, [shown, shown]):
        assert 0 == main(["html", *[str(file)] * files, "--json"])
        assert expected == json.decode(capsysbinary.readouterr().out)
    assert [file] == list(tmp_path.iterdir())


def test_html_refuses_what_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The profile is not written over, and one that is none is named."""
    file = tmp_path / "small.profile.json"
    save(small_profile(), file)
    before = file.read_bytes()
    assert 2 == main(["html", str(file), "-o", str(file)])
    assert "is one of the profiles" in capsys.readouterr().err
    assert before == file.read_bytes()
    assert 2 == main(["html", str(file), "--json", "-o", "x.html"])
    assert 2 == main(["html", str(tmp_path / "none.json")])
    assert "none.json" in capsys.readouterr().err
