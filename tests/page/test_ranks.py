"""The page's Ranks, and one rank chosen, in a real browser."""

from collections.abc import Callable

from msgspec.structs import replace

from lflops.profile.profile import Profile
from tests.support.browser import ROW, Seen
from tests.support.malicious_names import IMAGE, hostile_profile
from tests.support.profile_builders import small_profile
from tests.support.rank_profiles import answered, four_ranks, so_many, stat


def shown(page_of: Callable[..., Seen], given: Profile) -> Seen:
    """The view of a profile."""
    seen = page_of(given)
    seen.view("Ranks")
    return seen


def heads(seen: Seen) -> list[str]:
    """The columns of the heat map that are ranks'."""
    return seen.page.locator(".heat thead button").all_inner_texts()


def cells(seen: Seen, row: int) -> list[str]:
    """What a row of the heat map says of its cells."""
    found = seen.page.locator(".heat tbody tr").nth(row).locator("td:not(.amount)")
    return [cell.get_attribute("title") for cell in found.all()]


def numbers(seen: Seen) -> list[str]:
    """The ranks in the table, from top to bottom."""
    return seen.page.locator(f"{ROW} > :first-child").all_inner_texts()


def figures(seen: Seen) -> dict[str, str]:
    """Those of the window, by their labels."""
    seen.page.locator(".of-window .figure").first.wait_for()
    return dict(
        zip(
            *(
                seen.page.locator(f".of-window .figure-{part}").all_inner_texts()
                for part in ("label", "value")
            ),
            strict=True,
        )
    )


def test_the_slowest_rank_and_the_worst_place_come_first(page_of: Callable[..., Seen]) -> None:
    """Each cell with its seconds and what that is against the median rank.

    A rank that told nothing has none.
    """
    seen = shown(page_of, four_ranks())
    assert ["2", "0", "1", "3"] == heads(seen)
    assert ["head forward", "encoder.0 forward"] == seen.page.locator(
        ".heat tbody th"
    ).all_inner_texts()
    assert ["+100.0 %", "0 %", "0 %", ""] == seen.page.locator(".heat tbody tr").first.locator(
        "td:not(.amount)"
    ).all_inner_texts()
    assert (
        "head forward, rank 2: 2.00 ms, +100.0 % compared with the median rank (0.002 s)"
        == cells(seen, 0)[0]
    )
    assert "head forward, rank 3: no time reported" == cells(seen, 0)[3]
    assert "−10.0 % compared with the median rank" in cells(seen, 1)[2]
    seen.page.get_by_label("order of ranks").select_option("number")
    assert ["0", "1", "2", "3"] == heads(seen)


def test_many_times_as_slow_is_a_factor(page_of: Callable[..., Seen]) -> None:
    """429 ms against 1 ms."""
    seen = shown(
        page_of, replace(four_ranks(), rank_stats=(stat("head", {0: 1e-3, 1: 1e-3, 2: 429e-3}),))
    )
    assert ["×429", "0 %", "0 %", ""] == seen.page.locator(".heat tbody tr").first.locator(
        "td:not(.amount)"
    ).all_inner_texts()


def test_slower_and_faster_have_colours_of_their_own(page_of: Callable[..., Seen]) -> None:
    """Twice as long is the deepest of one, a tenth less a little of the other, the median none of either."""
    seen = shown(page_of, four_ranks())
    grounds = [
        [
            cell.evaluate("cell => cell.style.background")
            for cell in row.locator("td:not(.amount)").all()
        ]
        for row in seen.page.locator(".heat tbody tr").all()
    ]
    assert "--heat-slower) 100%" in grounds[0][0]
    assert "--heat-faster) 10%" in grounds[1][2]
    assert "0%" in grounds[0][1]
    assert "" == grounds[0][3]


def test_every_rank_is_listed_with_what_became_of_it(page_of: Callable[..., Seen]) -> None:
    """The slowest first; sorted by what is clicked on, what is unknown last."""
    seen = shown(page_of, four_ranks())
    assert ["2", "0", "1", "3"] == numbers(seen)
    assert "missing: no report arrived" == seen.page.locator(ROW).nth(3).locator(
        ".caveat"
    ).get_attribute("title")
    assert "failed" not in seen.page.locator(".ranks").inner_text()
    assert "missing: 3 (data 3)" in seen.page.locator(".ranks .facts").inner_text()
    seen.page.get_by_role("button", name="peak memory").click()
    assert ["0", "1", "2", "3"] == numbers(seen)
    seen.page.get_by_role("button", name="peak memory").click()
    assert ["2", "1", "0", "3"] == numbers(seen)


def test_a_row_leads_to_its_module(page_of: Callable[..., Seen]) -> None:
    """In Modules."""
    seen = shown(page_of, four_ranks())
    seen.page.locator(".heat").get_by_role("button", name="encoder.0").click()
    seen.page.locator(f"{ROW}.chosen .name[title='encoder.0']").wait_for()


def test_one_rank_is_shown_where_it_is_known_by_itself(page_of: Callable[..., Seen]) -> None:
    """Its step, data, CPU time, MACs and peak.

    The rest is said to be of the run; and the address keeps it.
    """
    seen = page_of(four_ranks())
    of_all, facts_of_all = figures(seen), seen.page.locator(".facts").inner_text()
    seen.page.get_by_label("rank", exact=True).select_option("2")
    found = figures(seen)
    own = {
        "step": "5.00 ms",
        "data wait": "300 µs",
        "CPU time": "6.00 ms",
        "MACs": "1.41 k",
        "peak live memory": "1000 B",
    }
    assert {f"{label}, rank 2": text for label, text in own.items()} == {
        label: text for label, text in found.items() if "rank 2" in label
    }
    assert facts_of_all == seen.page.locator(".facts").inner_text()
    seen.page.get_by_text(
        "The figures of rank 2 come first. All other figures are those of the whole run."
    ).wait_for()
    assert (
        "all ranks: 2.00 ms to 5.00 ms"
        == seen.page.locator(".of-window .figure .remark").first.inner_text()
    )
    seen.page.reload()
    seen.page.locator(".figures").first.wait_for()
    assert found == figures(seen)
    seen.page.get_by_label("rank", exact=True).select_option("all")
    assert of_all == figures(seen)


def test_what_a_missing_rank_took_is_unknown(page_of: Callable[..., Seen]) -> None:
    """A dash, not what others took."""
    seen = page_of(four_ranks())
    seen.page.get_by_label("rank", exact=True).select_option("3")
    assert {"–"} == {text for label, text in figures(seen).items() if "rank 3" in label}


def test_other_views_say_that_they_are_of_the_whole_run(page_of: Callable[..., Seen]) -> None:
    """As long as a rank is chosen."""
    seen = page_of(four_ranks())
    said = seen.page.locator(".of-all")
    assert "" == said.inner_text()
    seen.page.get_by_label("rank", exact=True).select_option("1")
    assert "" == said.inner_text()
    seen.modules()
    assert "This view shows the whole run" in said.inner_text()


def test_a_column_is_the_choice_of_its_rank(page_of: Callable[..., Seen]) -> None:
    """It is marked, in the table too; a further click takes the choice back."""
    seen = shown(page_of, four_ranks())
    seen.page.locator(".heat thead").get_by_role("button", name="0", exact=True).click()
    assert "0" == seen.page.get_by_label("rank", exact=True).input_value()
    assert 2 == seen.page.locator(".heat td.of-rank").count()
    assert "0" == seen.page.locator(f"{ROW} .of-rank").first.inner_text()
    seen.page.locator(".heat thead").get_by_role("button", name="0", exact=True).click()
    assert 0 == seen.page.locator(".heat .of-rank").count()


def test_1_024_ranks_fit_64_columns(page_of: Callable[..., Seen]) -> None:
    """32 of them alone, the slowest; the other 992 by 31, each with the slowest of them.

    By number they are all by 16.
    """
    seen = shown(page_of, so_many(1024))
    found = heads(seen)
    assert (64, "512", "1023", "992 +30") == (len(found), found[0], found[1], found[32])
    assert "head forward, 31 ranks, the slowest is rank 992: 1.99 ms" in cells(seen, 0)[32]
    seen.page.get_by_label("order of ranks").select_option("number")
    found = heads(seen)
    assert (64, "0 +15", "512 +15") == (len(found), found[0], found[32])
    assert "16 ranks, the slowest is rank 512: 9.00 ms" in cells(seen, 0)[32]
    assert seen.page.locator(ROW).count() < 100


def test_one_rank_alone_is_compared_with_nobody(page_of: Callable[..., Seen]) -> None:
    """Nor is there anything to choose."""
    seen = page_of(replace(small_profile(), ranks=()))
    assert 0 == seen.page.get_by_role("tab", name="Ranks", exact=True).count()
    assert 0 == seen.page.get_by_label("rank", exact=True).count()


def test_what_no_rank_told_is_said_to_be_unknown(page_of: Callable[..., Seen]) -> None:
    """An older file has no times by rank; a count none at all."""
    seen = shown(page_of, small_profile())
    assert "An earlier version of lflops wrote it" in seen.page.locator(".ranks").inner_text()
    seen = shown(page_of, replace(small_profile(), rank_stats=()))
    assert "no module has times of two ranks" in seen.page.locator(".ranks").inner_text()
    assert 0 == seen.page.locator(".heat").count()


def test_names_in_ranks_are_text(page_of: Callable[..., Seen]) -> None:
    """Of hosts, devices, coordinates and modules alike."""
    ranks = tuple(
        answered(number, host=IMAGE, device=IMAGE, coordinates={IMAGE: number})
        for number in range(2)
    )
    given = replace(hostile_profile(), ranks=ranks, rank_stats=(stat(IMAGE, {0: 1.0, 1: 2.0}),))
    seen = shown(page_of, given)
    assert f"{IMAGE} forward" == seen.page.locator(".heat tbody th").inner_text()
    assert 0 == seen.page.locator("img").count()
