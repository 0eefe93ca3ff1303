"""Test in a browser the view Ranks, and other views for one chosen rank."""

from collections.abc import Callable

from msgspec.structs import replace

from lflops.profile.profile import Profile
from tests.support.browser import ROW, Seen
from tests.support.malicious_names import IMAGE, hostile_profile
from tests.support.profile_builders import small_profile
from tests.support.rank_profiles import answered, four_ranks, so_many, stat


def shown(page_of: Callable[..., Seen], given: Profile) -> Seen:
    """Open the view Ranks of a profile."""
    seen = page_of(given)
    seen.view("Ranks")
    return seen


def heads(seen: Seen) -> list[str]:
    """Return the labels of the heat map's columns, which are ranks."""
    return seen.page.locator(".heat thead button").all_inner_texts()


def first_row(seen: Seen) -> list[str]:
    """Return the texts of the cells in the first row of the heat map."""
    row = seen.page.locator(".heat tbody tr").first
    return row.locator("td:not(.amount)").all_inner_texts()


def cells(seen: Seen, row: int) -> list[str]:
    """Return the tooltips of the cells in a row of the heat map."""
    found = seen.page.locator(".heat tbody tr").nth(row).locator("td:not(.amount)")
    return [cell.get_attribute("title") for cell in found.all()]


def numbers(seen: Seen) -> list[str]:
    """Return the ranks in the table, from top to bottom."""
    return seen.page.locator(f"{ROW} > :first-child").all_inner_texts()


def figures(seen: Seen) -> dict[str, str]:
    """Return the figures of the window by their labels."""
    seen.page.locator(".of-window .figure").first.wait_for()
    labels = seen.page.locator(".of-window .figure-label").all_inner_texts()
    values = seen.page.locator(".of-window .figure-value").all_inner_texts()
    return dict(zip(labels, values, strict=True))


def test_the_slowest_rank_and_the_worst_place_come_first(page_of: Callable[..., Seen]) -> None:
    """The heat map begins with the slowest rank and the module with the largest difference.

    A cell has the seconds and the difference from the median rank. A missing rank has empty cells.
    """
    seen = shown(page_of, four_ranks())
    assert ["2", "0", "1", "3"] == heads(seen)
    rows = seen.page.locator(".heat tbody th").all_inner_texts()
    assert ["head forward", "encoder.0 forward"] == rows
    assert ["+100.0 %", "0 %", "0 %", ""] == first_row(seen)
    assert (
        "head forward, rank 2: 2.00 ms, +100.0 % compared with the median rank (0.002 s)"
        == cells(seen, 0)[0]
    )
    assert "head forward, rank 3: no time reported" == cells(seen, 0)[3]
    assert "−10.0 % compared with the median rank" in cells(seen, 1)[2]
    seen.page.get_by_label("order of ranks").select_option("number")
    assert ["0", "1", "2", "3"] == heads(seen)


def test_many_times_as_slow_is_a_factor(page_of: Callable[..., Seen]) -> None:
    """A large difference is shown as a factor: 429 ms are ×429 of 1 ms."""
    head = stat("head", {0: 1e-3, 1: 1e-3, 2: 429e-3})
    seen = shown(page_of, replace(four_ranks(), rank_stats=(head,)))
    assert ["×429", "0 %", "0 %", ""] == first_row(seen)


def test_slower_and_faster_have_colours_of_their_own(page_of: Callable[..., Seen]) -> None:
    """Slower and faster cells have different colours, which are stronger for larger differences.

    The cell of twice the median time has the full colour, and the cell of 10 % less has 10 % of the
    other colour. The median itself has no colour.
    """
    seen = shown(page_of, four_ranks())
    backgrounds = []
    for row in seen.page.locator(".heat tbody tr").all():
        row_cells = row.locator("td:not(.amount)").all()
        backgrounds.append([cell.evaluate("cell => cell.style.background") for cell in row_cells])
    assert "--heat-slower) 100%" in backgrounds[0][0]
    assert "--heat-faster) 10%" in backgrounds[1][2]
    assert "0%" in backgrounds[0][1]
    assert "" == backgrounds[0][3]


def test_every_rank_is_listed_with_what_became_of_it(page_of: Callable[..., Seen]) -> None:
    """The table lists every rank with its status, the slowest first.

    It can be sorted by any column; unknown values come last.
    """
    seen = shown(page_of, four_ranks())
    assert ["2", "0", "1", "3"] == numbers(seen)
    status = seen.page.locator(ROW).nth(3).locator(".caveat")
    assert "missing: no report arrived" == status.get_attribute("title")
    assert "failed" not in seen.page.locator(".ranks").inner_text()
    assert "missing: 3 (data 3)" in seen.page.locator(".ranks .facts").inner_text()
    seen.page.get_by_role("button", name="peak memory").click()
    assert ["0", "1", "2", "3"] == numbers(seen)
    seen.page.get_by_role("button", name="peak memory").click()
    assert ["2", "1", "0", "3"] == numbers(seen)


def test_a_row_leads_to_its_module(page_of: Callable[..., Seen]) -> None:
    """A click on a row of the heat map chooses the module in the view Modules."""
    seen = shown(page_of, four_ranks())
    seen.page.locator(".heat").get_by_role("button", name="encoder.0").click()
    seen.page.locator(f"{ROW}.chosen .name[title='encoder.0']").wait_for()


def test_one_rank_is_shown_where_it_is_known_by_itself(page_of: Callable[..., Seen]) -> None:
    """Figures of a chosen rank come first; the page says that all others are of the whole run.

    Known by rank are the step, data wait, CPU time, MACs and peak. The address keeps the choice.
    """
    seen = page_of(four_ranks())
    of_all = figures(seen)
    facts_of_all = seen.page.locator(".facts").inner_text()
    seen.page.get_by_label("rank", exact=True).select_option("2")
    found = figures(seen)
    own = {
        "step": "5.00 ms",
        "data wait": "300 µs",
        "CPU time": "6.00 ms",
        "MACs": "1.41 k",
        "peak live memory": "1000 B",
    }
    of_rank = {label: text for label, text in found.items() if "rank 2" in label}
    assert {f"{label}, rank 2": text for label, text in own.items()} == of_rank
    assert facts_of_all == seen.page.locator(".facts").inner_text()
    seen.page.get_by_text(
        "The figures of rank 2 come first. All other figures are those of the whole run."
    ).wait_for()
    remark = seen.page.locator(".of-window .figure .remark").first
    assert "all ranks: 2.00 ms to 5.00 ms" == remark.inner_text()
    seen.page.reload()
    seen.page.locator(".figures").first.wait_for()
    assert found == figures(seen)
    seen.page.get_by_label("rank", exact=True).select_option("all")
    assert of_all == figures(seen)


def test_what_a_missing_rank_took_is_unknown(page_of: Callable[..., Seen]) -> None:
    """The figures of a missing rank are dashes, not the figures of other ranks."""
    seen = page_of(four_ranks())
    seen.page.get_by_label("rank", exact=True).select_option("3")
    assert {"–"} == {text for label, text in figures(seen).items() if "rank 3" in label}


def test_other_views_say_that_they_are_of_the_whole_run(page_of: Callable[..., Seen]) -> None:
    """While a rank is chosen, views that cannot show a single rank say so."""
    seen = page_of(four_ranks())
    said = seen.page.locator(".of-all")
    assert "" == said.inner_text()
    seen.page.get_by_label("rank", exact=True).select_option("1")
    assert "" == said.inner_text()
    seen.modules()
    assert "This view shows the whole run" in said.inner_text()


def test_a_column_is_the_choice_of_its_rank(page_of: Callable[..., Seen]) -> None:
    """A click on a column chooses its rank and marks it, and a second click undoes the choice."""
    seen = shown(page_of, four_ranks())
    seen.page.locator(".heat thead").get_by_role("button", name="0", exact=True).click()
    assert "0" == seen.page.get_by_label("rank", exact=True).input_value()
    assert 2 == seen.page.locator(".heat td.of-rank").count()
    assert "0" == seen.page.locator(f"{ROW} .of-rank").first.inner_text()
    seen.page.locator(".heat thead").get_by_role("button", name="0", exact=True).click()
    assert 0 == seen.page.locator(".heat .of-rank").count()


def test_1_024_ranks_fit_64_columns(page_of: Callable[..., Seen]) -> None:
    """The heat map has at most 64 columns: 32 for the slowest ranks, 32 for groups of other ranks.

    The other 992 ranks are in groups of 31. Sorted by number, all ranks are in groups of 16. A
    group shows its slowest rank.
    """
    seen = shown(page_of, so_many(1024))
    found = heads(seen)
    assert 64 == len(found)
    assert ["512", "1023"] == found[:2]
    # The first group: rank 992 and 30 faster ranks
    assert "992 +30" == found[32]
    assert "head forward, 31 ranks, the slowest is rank 992: 1.99 ms" in cells(seen, 0)[32]
    seen.page.get_by_label("order of ranks").select_option("number")
    found = heads(seen)
    assert 64 == len(found)
    assert "0 +15" == found[0]
    assert "512 +15" == found[32]
    assert "16 ranks, the slowest is rank 512: 9.00 ms" in cells(seen, 0)[32]
    assert seen.page.locator(ROW).count() < 100


def test_one_rank_alone_is_compared_with_nobody(page_of: Callable[..., Seen]) -> None:
    """A run of one rank has no Ranks tab and no choice of ranks."""
    seen = page_of(replace(small_profile(), ranks=()))
    assert 0 == seen.page.get_by_role("tab", name="Ranks", exact=True).count()
    assert 0 == seen.page.get_by_label("rank", exact=True).count()


def test_what_no_rank_told_is_said_to_be_unknown(page_of: Callable[..., Seen]) -> None:
    """The view says why there are no times by rank.

    Files of earlier versions lack these times, and a count has no times at all.
    """
    seen = shown(page_of, small_profile())
    assert (
        "an earlier version of lflops wrote this profile"
        in seen.page.locator(".ranks").inner_text()
    )
    seen = shown(page_of, replace(small_profile(), rank_stats=()))
    assert "no module was timed on two ranks" in seen.page.locator(".ranks").inner_text()
    assert 0 == seen.page.locator(".heat").count()


def test_names_in_ranks_are_text(page_of: Callable[..., Seen]) -> None:
    """Names of hosts, devices, coordinates and modules are shown as text."""
    ranks = (
        answered(0, host=IMAGE, device=IMAGE, coordinates={IMAGE: 0}),
        answered(1, host=IMAGE, device=IMAGE, coordinates={IMAGE: 1}),
    )
    given = replace(hostile_profile(), ranks=ranks, rank_stats=(stat(IMAGE, {0: 1.0, 1: 2.0}),))
    seen = shown(page_of, given)
    assert f"{IMAGE} forward" == seen.page.locator(".heat tbody th").inner_text()
    assert 0 == seen.page.locator("img").count()
