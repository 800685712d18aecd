"""What measured configurations say about the autotuner: errors, ranks, gains, a plot. Functions of the times alone."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uniep.autotune.cost_model import BACKWARD, FORWARD
from uniep.autotune.hardware import TUNED

# tile, num_link, num_local of a launch.
Config = tuple[str, int, int]


@dataclass(frozen=True)
class Survey:
    """One layer with one number of tokens.

    Attributes:
        shape: its name.
        num_tokens: T of a rank.
        measured_us: launch -> configuration -> its time, the median where it was drawn again.
        chosen, default: launch -> the model's choice, and the un-tuned configuration; both are among the measured.
    """

    shape: str
    num_tokens: int
    measured_us: Mapping[str, Mapping[Config, float]]
    chosen: Mapping[str, Config]
    default: Mapping[str, Config]


@dataclass(frozen=True)
class Tuned:
    """What was found of a layer.

    Attributes:
        survey: of all configurations.
        final_us: launch -> configuration -> times of those that were measured in turn, round by round.
        predicted_us: launch -> configuration of the survey -> time by the model.
        fixed_us: median time of the steps without a configuration; predicted_fixed_us: the same by the model.
    """

    survey: Survey
    final_us: Mapping[str, Mapping[Config, Sequence[float]]]
    predicted_us: Mapping[str, Mapping[Config, float]]
    fixed_us: Mapping[str, float]
    predicted_fixed_us: Mapping[str, float]


def medians(times: Mapping[Config, Sequence[float]]) -> dict[Config, float]:
    return {config: statistics.median(us) for config, us in times.items()}


def best_us(times: Mapping[Config, Sequence[float]]) -> float:
    """What the best configuration takes. Half of the rounds choose it, the other half say its time, both ways round:
    the least of some noisy medians is too small by as much as chance made it."""
    halves = [{config: statistics.median(us[first::2]) for config, us in times.items()} for first in (0, 1)]
    return statistics.fmean(other[min(half, key=half.__getitem__)] for half, other in (halves, reversed(halves)))


def best_fixed(surveys: Sequence[Survey]) -> dict[str, Config]:
    """launch -> of the configurations that were measured everywhere, the one with the least geometric mean of times."""
    found = {}
    for launch in TUNED:
        common = set.intersection(*(set(one.measured_us[launch]) for one in surveys))

        def mean(config: Config, launch: str = launch) -> float:
            return statistics.fmean(math.log(one.measured_us[launch][config]) for one in surveys)

        found[launch] = min(sorted(common), key=mean)
    return found


def rows(tuned: Sequence[Tuned], fixed: Mapping[str, Config]) -> list[dict[str, Any]]:
    """A row for each layer, number of tokens and pass. The best of a pass is made of the best of each launch, which
    share nothing. fixed: what best_fixed says."""
    return [
        _row(one, which, steps, fixed)
        for one in tuned
        for which, steps in (("forward", FORWARD), ("backward", BACKWARD))
    ]


def _row(one: Tuned, which: str, steps: Sequence[str], fixed: Mapping[str, Config]) -> dict[str, Any]:
    survey = one.survey
    launches = [step for step in steps if step in TUNED]
    rest = [step for step in steps if step not in TUNED]
    base_us = sum(one.fixed_us[step] for step in rest)
    final_us = {launch: medians(one.final_us[launch]) for launch in launches}

    def total_us(configs: Mapping[str, Config]) -> float:
        return base_us + sum(final_us[launch][configs[launch]] for launch in launches)

    best = {launch: min(final_us[launch], key=final_us[launch].__getitem__) for launch in launches}
    best_of_us = {launch: best_us(one.final_us[launch]) for launch in launches}
    predicted_us = sum(one.predicted_fixed_us[step] for step in rest)
    predicted_us += sum(one.predicted_us[launch][survey.chosen[launch]] for launch in launches)
    chosen_us, least_us = total_us(survey.chosen), base_us + sum(best_of_us.values())
    return {
        "shape": survey.shape,
        "tokens": survey.num_tokens,
        "pass": which,
        "predicted_us": round(predicted_us, 1),
        "measured_us": round(chosen_us, 1),
        "error": round(predicted_us / chosen_us - 1, 4),
        "best_us": round(least_us, 1),
        "over_best": round(chosen_us / least_us - 1, 4),
        "default_us": round(total_us(survey.default), 1),
        "gain_over_default": round(total_us(survey.default) / chosen_us, 4),
        "best_fixed_us": round(total_us(fixed), 1),
        "gain_over_best_fixed": round(total_us(fixed) / chosen_us, 4),
        "launches": {
            launch: {
                "chosen": list(survey.chosen[launch]),
                "predicted_us": round(one.predicted_us[launch][survey.chosen[launch]], 1),
                "measured_us": round(final_us[launch][survey.chosen[launch]], 1),
                "best": list(best[launch]),
                "best_us": round(best_of_us[launch], 1),
                "rank": rank_of(survey.measured_us[launch], survey.chosen[launch]),
                "measured": len(survey.measured_us[launch]),
            }
            for launch in launches
        },
    }


def rank_of(measured_us: Mapping[Config, float], config: Config) -> int:
    """1 for the fastest."""
    return 1 + sum(us < measured_us[config] for us in measured_us.values())


def summary(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Over all rows; the geometric means of the gains."""
    errors = [abs(row["error"]) for row in found]
    return {
        "mean_abs_error": round(statistics.fmean(errors), 4),
        "max_abs_error": round(max(errors), 4),
        "max_over_best": max(row["over_best"] for row in found),
        "gain_over_default": round(statistics.geometric_mean(row["gain_over_default"] for row in found), 4),
        "gain_over_best_fixed": round(statistics.geometric_mean(row["gain_over_best_fixed"] for row in found), 4),
    }


def line(row: Mapping[str, Any]) -> str:
    ranks = ", ".join(
        f"{name} {'+'.join(str(part) for part in launch['chosen'])} is {launch['rank']} of {launch['measured']}"
        for name, launch in row["launches"].items()
    )
    return (
        f"{row['shape']:22} T{row['tokens']:<6} {row['pass']:8} predicted {row['predicted_us']:8.0f}  measured "
        f"{row['measured_us']:8.0f} us ({100 * row['error']:+5.1f} %)  best {row['best_us']:8.0f} "
        f"({100 * row['over_best']:+.1f} %)  default x{row['gain_over_default']:.3f}  "
        f"best fixed x{row['gain_over_best_fixed']:.3f}  {ranks}"
    )


def plot(tuned: Sequence[Tuned], path: Path) -> None:
    """Predicted against measured times of every configuration, a panel a launch; the chosen ones, as measured in turn,
    stand out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    for axes, launch in zip(figure.subplots(2, 2).flat, TUNED, strict=True):
        for one in tuned:
            survey, predicted_us = one.survey, one.predicted_us[launch]
            times = {config: us / 1e3 for config, us in survey.measured_us[launch].items()}
            predicted = [predicted_us[config] / 1e3 for config in times]
            axes.scatter(list(times.values()), predicted, s=6, alpha=0.4, label=f"{survey.shape}, {survey.num_tokens}")
            chosen = survey.chosen[launch]
            axes.scatter(
                statistics.median(one.final_us[launch][chosen]) / 1e3,
                predicted_us[chosen] / 1e3,
                s=40,
                marker="x",
                c="black",
            )
        ends = [limit for limits in (axes.get_xlim(), axes.get_ylim()) for limit in limits if limit > 0]
        axes.plot([min(ends), max(ends)], [min(ends), max(ends)], lw=0.8, c="grey")
        axes.set(title=launch, xlabel="measured, ms", ylabel="predicted, ms", xscale="log", yscale="log")
    if len(tuned) <= 12:
        figure.axes[0].legend(fontsize=6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
