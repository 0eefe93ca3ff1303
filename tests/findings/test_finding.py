"""Test how reliable findings are: the lower end of a confidence interval, and its sentence."""

import pytest

from lflops.findings.finding import Finding, least_share


@pytest.mark.parametrize("total", [3, 8, 39])
def test_where_all_were_right_the_share_has_a_formula(total: int) -> None:
    """If all findings were right, the lower end is the share with `share ** total` = 5 %."""
    assert least_share(total, total) == pytest.approx(0.05 ** (1 / total), abs=1e-6)


@pytest.mark.parametrize(("right", "total", "share"), [(7, 8, 0.5293), (0, 5, 0.0)])
def test_the_share_is_that_of_the_tables(right: int, total: int, share: float) -> None:
    """The expected values are from tables of the Clopper-Pearson interval with 90 % confidence."""
    assert least_share(right, total) == pytest.approx(share, abs=1e-4)


def test_a_finding_says_the_share_rounded_down() -> None:
    """If the reliability was not measured, the text is empty."""
    finding = Finding(cause="data", sentence="It waits.", right=(8, 8))
    assert finding.track_record.startswith(
        "at least 68 % of such findings are right, measured in 8 "
    )
    assert "" == Finding(cause="data", sentence="It waits.").track_record
