"""Test the view Operators in a browser."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from lflops.profile.profile import Profile, UnsupportedCall
from lflops.profile.records import TracedOperator
from tests.support.browser import ROW, Seen
from tests.support.compiled_profiles import compiled_profile
from tests.support.malicious_names import IMAGE, SCRIPT, hostile_profile
from tests.support.profile_builders import product, profile, profile_of, small_profile

SHEET = "[role=grid] .grid-body [role=row]"


@pytest.fixture
def operators_of(page_of: Callable[..., Seen]) -> Callable[..., Seen]:
    """Return a function that opens the view Operators of a profile."""

    def go(given: Profile) -> Seen:
        seen = page_of(given)
        seen.view("Operators")
        seen.page.locator(".operators").wait_for()
        return seen

    return go


def order(seen: Seen) -> list[str]:
    """Return the operators in the table, from top to bottom."""
    return seen.page.locator(f"{SHEET} .name .label").all_inner_texts()


def cells(seen: Seen, operator: str) -> dict[str, str]:
    """Return the cells of an operator by the labels of their columns."""
    heads = []
    for head in seen.page.locator("[role=columnheader]").all():
        # The arrow of the sorted column is not part of its label.
        heads.append(head.inner_text().replace("\n", " ").rstrip(" ▾▴"))
    row = seen.page.locator(SHEET).filter(has=seen.page.locator(f".name[title='{operator}']")).first
    return dict(zip(heads, row.locator("[role=gridcell]").all_inner_texts(), strict=True))


def test_what_has_no_formula_comes_first(operators_of: Callable[..., Seen]) -> None:
    """Operators without a formula come first in any order of the table.

    A caveat names them, and their unknown counts are dashes.
    """
    seen = operators_of(small_profile())
    assert (
        "1 operator has no formula, so its work is not included in any total"
        in seen.page.locator(".operators .caveat").inner_text()
    )
    for _ in range(2):
        assert "my_ops::scan" == order(seen)[0]
        seen.page.get_by_role("button", name="calls").click()
    assert "no formula: not in any total" == seen.page.locator(f"{SHEET} .mark").inner_text()
    assert {
        "calls": "2",
        "MACs": "–",
        "share of MACs": "–",
        "bytes moved": "64 B",
    }.items() <= cells(seen, "my_ops::scan").items()


def test_an_operator_has_its_figures(operators_of: Callable[..., Seen]) -> None:
    """`aten::addmm` has its counts and its traced times.

    By `small_profile`, it has 640 of 1,408 MACs, 1,280 FLOPs and 960 + 424 bytes. By batch of the
    trace, it took 100 µs on the host, 50 µs of them self time.
    """
    seen = operators_of(small_profile())
    expected = {
        "dtype": "float32",
        "calls": "2",
        "MACs": "640",
        "FLOPs": "1.28 k",
        "share of MACs": "45.5 %",
        "bytes moved": "1.35 KiB",
        "FLOPs/byte": "0.92",
        "self device time, traced": "15.0 µs",
        "self host time, traced": "50.0 µs",
        "host time, traced": "100 µs",
    }
    assert expected.items() <= cells(seen, "aten::addmm").items()


def test_a_phase_can_be_chosen(operators_of: Callable[..., Seen]) -> None:
    """Operators are shown for one phase, or for each phase in separate rows.

    Shares then refer to the phase. Traced times are not shown, because they belong to no phase.
    """
    seen = operators_of(small_profile())
    choice = seen.page.get_by_label("phase", exact=True)
    choice.select_option("optimizer")
    assert ["aten::_foreach_add_"] == order(seen)
    assert "100.0 %" == cells(seen, "aten::_foreach_add_")["share of FLOPs"]
    assert "host time, traced" not in cells(seen, "aten::_foreach_add_")
    choice.select_option("each")
    assert "backward" == cells(seen, "aten::mm")["phase"]
    assert 7 == len(order(seen))


def test_operators_are_sorted_and_filtered(operators_of: Callable[..., Seen]) -> None:
    """The table is sorted by names and filtered; the address keeps both."""
    seen = operators_of(replace(small_profile(), unsupported=()))
    seen.page.get_by_role("button", name="operator", exact=True).click()
    assert sorted(order(seen)) == order(seen)
    seen.page.get_by_label("filter by name or dtype").fill("GELU")
    seen.page.reload()
    seen.page.locator(SHEET).first.wait_for()
    assert ["aten::gelu", "aten::gelu_backward"] == order(seen)
    assert "2 of 6 match" == seen.page.locator(".bar-of-controls .quiet").inner_text()
    assert 0 == seen.page.locator(".operators .caveat").count()


def test_an_operator_leads_to_its_modules(operators_of: Callable[..., Seen]) -> None:
    """A chosen operator lists its modules, sorted by work; a click goes to a module's row."""
    seen = operators_of(small_profile())
    seen.page.locator(SHEET).filter(has=seen.page.locator(".name[title='aten::addmm']")).click()
    table = seen.page.get_by_role("table", name="modules that ran aten::addmm")
    assert ["encoder.0", "head"] == table.get_by_role("button").all_inner_texts()
    first = table.locator("tbody tr").first
    assert ["1", "512", "1.02 k", "960 B"] == first.locator("td").all_inner_texts()
    table.get_by_role("button", name="encoder.0").click()
    seen.page.locator(f"{ROW}.chosen .name[title='encoder.0']").wait_for()


def test_of_many_modules_the_first_are_named(operators_of: Callable[..., Seen]) -> None:
    """Of 100 modules, 20 are listed. The operator is chosen with the keyboard here."""
    seen = operators_of(profile_of(100))
    seen.page.locator("[role=grid]").press("Home")
    assert 20 == seen.page.locator(".within tbody tr").count()
    assert "and 80 more modules with less work" in seen.page.locator(".within").inner_text()


def test_what_only_the_trace_saw_is_marked(operators_of: Callable[..., Seen]) -> None:
    """An operator that only the trace has is shown with unknown counts and modules.

    It was called by another operator, so it was not counted.
    """
    given = small_profile()
    assert given.trace
    copy = TracedOperator(
        name="aten::copy_",
        calls=2,
        host_seconds=2e-4,
        self_host_seconds=2e-4,
        device_seconds=0.0,
        self_device_seconds=0.0,
    )
    seen = operators_of(replace(given, trace=replace(given.trace, operators=(copy,))))
    assert {"calls": "–", "host time, traced": "100 µs"}.items() <= cells(seen, "copy_").items()
    seen.page.locator(SHEET).filter(has=seen.page.locator(".name[title='copy_']")).click()
    assert "the modules that ran it are unknown" in seen.page.locator(".within").inner_text()


def test_where_nothing_was_counted_there_is_no_such_tab(page_of: Callable[..., Seen]) -> None:
    """Without counted operators there is no Operators tab."""
    seen = page_of(profile({"": {}}, []))
    assert 0 == seen.page.get_by_role("tab", name="Operators", exact=True).count()


def test_names_of_operators_are_text(operators_of: Callable[..., Seen]) -> None:
    """Names are shown as text, also without a formula and in the list of modules."""
    given = replace(
        hostile_profile(),
        unsupported=(
            UnsupportedCall(module=IMAGE, operator=SCRIPT, phase="forward", calls=1, bytes=1),
        ),
    )
    seen = operators_of(given)
    assert [SCRIPT, IMAGE] == order(seen)
    seen.page.locator("[role=grid]").press("End")
    assert IMAGE in seen.page.locator(".within").inner_text()
    assert 0 == seen.page.locator("img").count()


def test_a_count_beyond_what_a_double_holds_is_whole(operators_of: Callable[..., Seen]) -> None:
    """A count above 2^53 is shown to its last digit."""
    seen = operators_of(
        profile({"": {}}, [product("", "mm", "forward", macs=2**60 + 1, bytes_moved=1)])
    )
    assert 1 == seen.page.locator('.number[title="MACs: 1,152,921,504,606,846,977"]').count()


def test_kernels_of_compiled_code_are_another_table(operators_of: Callable[..., Seen]) -> None:
    """Kernels of compiled code have a table with their modules and shares of the compiled time.

    Kernels that combine operators of several modules are marked. A module's name leads to its row.
    """
    seen = operators_of(compiled_profile())
    seen.page.get_by_label("table", exact=True).select_option("kernels")
    seen.page.locator("section[aria-label='kernels of compiled code']").wait_for()
    remark = seen.page.locator(".operators > .remark").inner_text()
    assert (
        "2 compiled graphs. 90.0 % of the time in compiled code belongs to known modules. "
        "Kernels that combine operators of several modules took 20.0 %"
    ) in remark
    expected = {
        "module": "encoder.1",
        "phase": "forward",
        "host time, traced": "20.0 µs",
        "share of time in compiled code": "20.0 %",
        "fused bytes moved": "256 B",
        "modules in kernel": "2",
    }
    assert expected.items() <= cells(seen, "cpp_fused_gelu_0").items()
    assert ["fused"] == seen.page.locator(f"{SHEET} .mark").all_inner_texts()
    seen.page.get_by_label("filter by kernel or module").fill("ENCODER.0")
    assert ["extern_kernels.addmm", "extern_kernels.mm"] == order(seen)
    seen.page.locator(f"{SHEET} .to-row").first.click()
    seen.page.locator(f"{ROW}.chosen .name[title='encoder.0']").wait_for()


def test_without_compiled_code_there_is_no_choice_of_tables(
    operators_of: Callable[..., Seen],
) -> None:
    """Without compiled code, there is only one table and nothing to choose."""
    assert operators_of(small_profile()).page.get_by_label("table", exact=True).count() == 0
