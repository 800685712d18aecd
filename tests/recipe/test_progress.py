"""recipes.progress: how far a run is and when it ends."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from recipes.progress import Progress, end_date, humanize

NOW = datetime(2027, 1, 1, tzinfo=UTC)
QUARTER = Progress(step=100, num_steps=400, tokens_seen=1_000_000, tokens_per_second=1000.0, elapsed_s=1234.4)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (138.2e9, "138.2 B"),
        (1.5e12, "1.5 T"),
        (5_440_000, "5.4 M"),
        (1234, "1.2 K"),
        (12.4, "12 "),
        (999_960, "1.0 M"),
        (999.4, "999 "),
        (0, "0 "),
    ],
)
def test_humanize(number, text):
    assert humanize(number) == text


def test_the_line_of_a_run():
    # 3,000,000 tokens are left.
    assert QUARTER.line(NOW) == "0:20:34 elapsed, 0:50:00 left, 1.0 M of 4.0 M tokens"
    assert QUARTER.metrics() == {"progress/done(%)": 25.0, "progress/elapsed_s": 1234.4, "progress/left_s": 3000.0}


def test_the_last_step_has_nothing_left():
    done = replace(QUARTER, step=400, tokens_seen=4_000_000)
    assert done.left_s == 0
    assert "0:00:00 left, 4.0 M of 4.0 M tokens" in done.line(NOW)


def test_a_budget_has_an_end():
    # 86,400,000 tokens a day.
    budget = replace(QUARTER, token_budget=1e6 + 864e6)
    assert budget.line(NOW).endswith(", 0.116% of the 865.0 M token budget, which ends on 2027-01-11 00:00 UTC")
    assert budget.metrics()["progress/budget_left_days"] == 10
    assert budget.metrics()["progress/budget_done(%)"] == pytest.approx(100 / 865)


def test_a_budget_that_is_spent():
    spent = replace(QUARTER, token_budget=5e5)
    assert spent.line(NOW).endswith(", 200% of the 500.0 K token budget, which is used up")


def test_an_end_beyond_the_calendar():
    assert end_date(NOW, 1e12) == "in 31,688 years"
    assert end_date(NOW, 3600) == "on 2027-01-01 01:00 UTC"
