"""How far a run is, and when it ends."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

SECONDS_PER_DAY = 86400
_SECONDS_PER_YEAR = 365.25 * SECONDS_PER_DAY


def humanize(number: float) -> str:
    """138200000000 -> "138.2 B"."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size * 0.9995:
            return f"{number / size:.1f} {letter}"
    return f"{number:.0f} "


def end_date(now: datetime, seconds: float) -> str:
    """The date that many seconds from now, in words; beyond a thousand years, which no calendar holds, the years."""
    if seconds > 1000 * _SECONDS_PER_YEAR:
        return f"in {seconds / _SECONDS_PER_YEAR:,.0f} years"
    return f"on {now + timedelta(seconds=seconds):%Y-%m-%d %H:%M} UTC"


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step.

    Attributes:
        step: the step, of num_steps.
        tokens_seen: tokens of all ranks since the first step.
        tokens_per_second: the rate at which the rest is expected to go, of all ranks.
        elapsed_s: since this start of the run.
        token_budget: `[throughput] token_budget`, or None.
    """

    step: int
    num_steps: int
    tokens_seen: int
    tokens_per_second: float
    elapsed_s: float
    token_budget: float | None = None

    @property
    def total_tokens(self) -> float:
        """Tokens that the run will have seen after num_steps."""
        return self.tokens_seen / self.step * self.num_steps

    @property
    def left_s(self) -> float:
        return (self.total_tokens - self.tokens_seen) / self.tokens_per_second

    @property
    def budget_left_s(self) -> float | None:
        """Seconds until the budget's last token, which more steps than num_steps may be needed for."""
        if self.token_budget is None:
            return None
        return max(self.token_budget - self.tokens_seen, 0) / self.tokens_per_second

    def metrics(self) -> dict[str, float]:
        """For wandb and TensorBoard."""
        found = {
            "progress/done(%)": 100 * self.step / self.num_steps,
            "progress/elapsed_s": self.elapsed_s,
            "progress/left_s": self.left_s,
        }
        if self.token_budget is not None and self.budget_left_s is not None:
            found["progress/budget_done(%)"] = 100 * self.tokens_seen / self.token_budget
            found["progress/budget_left_days"] = self.budget_left_s / SECONDS_PER_DAY
        return found

    def line(self, now: datetime | None = None) -> str:
        """For the console. `now` is in UTC; by default the clock's."""
        text = (
            f"{_duration(self.elapsed_s)} elapsed, {_duration(self.left_s)} left, "
            f"{humanize(self.tokens_seen).strip()} of {humanize(self.total_tokens).strip()} tokens"
        )
        if self.token_budget is not None and self.budget_left_s is not None:
            share = 100 * self.tokens_seen / self.token_budget
            left_s = self.budget_left_s
            ends = f"which ends {end_date(now or datetime.now(UTC), left_s)}" if left_s else "which is used up"
            text += f", {share:.3g}% of the {humanize(self.token_budget).strip()} token budget, {ends}"
        return text


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
