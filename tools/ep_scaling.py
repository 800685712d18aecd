"""How one MoE layer's time grows with the expert-parallel degree, at a fixed number of tokens per rank.

python -m tools.bench_moe --ep 1 --pass both --out ep1.json        # then --ep 2, 4, 8, each with a file of its own
python -m tools.ep_scaling ep1.json ep2.json ... --plot FILE.png

Prints, for every layer and degree, the times and how much longer they are than at the smallest degree. With a balanced
router a rank computes as many rows at every degree, by fewer experts: growth is what the exchange costs, less what
fewer, fuller experts gain. Rows with unequal bits, and runs that differ in anything but the degree, are refused.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.command import end_with
from tools.pyplot import PlotError, load_pyplot

CURVES = {"stock": "TorchTitan", "uniep": "uniep", "gemm": "its grouped GEMMs alone"}
# Equal in all files, and in all rows of a layer.
COMMON, LAYER = ("pass", "tokens", "gpu", "versions", "commit"), ("E", "K", "D", "F")

# layer -> EP degree -> curve -> milliseconds
Growth = dict[str, dict[int, dict[str, float]]]


class ScalingError(ValueError):
    """The files are no runs of one benchmark. The text says why in one line."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON file of tools.bench_moe, each with its file, GPU, versions and commit.

    Raises:
        ScalingError: it is none.
    """
    try:
        record = json.loads(path.read_text())
        common = {key: record[key] for key in ("gpu", "versions", "commit")}
        wanted = ("shape", "ep", "pass", "tokens", *LAYER, "bits_equal", *(f"{curve}_ms" for curve in CURVES))
        return [{key: row[key] for key in wanted} | common | {"file": str(path)} for row in record["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ScalingError(f"{path} must be a file of tools.bench_moe --out, got {error!r}") from None


def growth(rows: Sequence[Mapping[str, Any]]) -> Growth:
    """The times by layer and degree.

    Raises:
        ScalingError: a row has unequal bits, or the rows do not differ in layer and degree alone.
    """
    found: Growth = {}
    first_of: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        where = f"{row['file']}, {row['shape']}"
        if not row["bits_equal"]:
            raise ScalingError(f"{where}: bits must equal TorchTitan's, got unequal ones: no time counts")
        first = first_of.setdefault(row["shape"], row)
        for key, other in [(key, rows[0]) for key in COMMON] + [(key, first) for key in LAYER]:
            if row[key] != other[key]:
                raise ScalingError(f"{where}: {key} must be {other[key]} as in {other['file']}, got {row[key]}")
        by_degree = found.setdefault(row["shape"], {})
        if row["ep"] in by_degree:
            raise ScalingError(f"{where}: every degree must come once for a layer, got a second ep = {row['ep']}")
        by_degree[row["ep"]] = {curve: row[f"{curve}_ms"] for curve in CURVES}
    if len({row["ep"] for row in rows}) < 2:
        raise ScalingError(f"the files must hold two EP degrees at least, got {sorted({row['ep'] for row in rows})}")
    return {layer: dict(sorted(by_degree.items())) for layer, by_degree in found.items()}


def lines(found: Growth) -> list[str]:
    text = []
    for layer, by_degree in found.items():
        smallest = next(iter(by_degree.values()))
        for degree, times in by_degree.items():
            curves = "  ".join(f"{name} {ms:8.3f} ms (x{ms / smallest[name]:.2f})" for name, ms in times.items())
            text.append(f"{layer:22} EP {degree:<2}  {curves}  {times['stock'] / times['uniep']:.2f}x stock")
    return text


def plot(found: Growth, title: str, path: Path) -> None:
    """A panel a layer: milliseconds over the EP degree."""
    from matplotlib.figure import Figure

    columns = min(4, len(found))
    num_rows = math.ceil(len(found) / columns)
    figure = Figure(figsize=(1 + 3.2 * columns, 1 + 2.6 * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, columns, squeeze=False).flat
    for axes, (layer, by_degree) in zip(panels, found.items(), strict=False):
        degrees = list(by_degree)
        for curve, label in CURVES.items():
            axes.plot(degrees, [by_degree[degree][curve] for degree in degrees], marker="o", label=label)
        axes.set(title=layer, xscale="log", xlabel="EP degree", ylabel="ms")
        axes.set_xticks(degrees, [str(degree) for degree in degrees])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
    for axes in list(figure.axes)[len(found) :]:
        axes.remove()
    figure.suptitle(title)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(CURVES))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, format="png")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", metavar="FILE.json", nargs="+", type=Path, help="what tools.bench_moe --out wrote")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="PNG to write")
    options = parser.parse_args(argv)
    try:
        if options.plot:
            load_pyplot("--plot")
        if options.plot and options.plot.resolve() in {file.resolve() for file in options.files}:
            raise ScalingError(f"--plot must be another file than those read, got {options.plot}")
        rows = [row for file in options.files for row in read_rows(file)]
        found = growth(rows)
        print("\n".join(lines(found)))
        if options.plot:
            passes = {"both": "forward and backward", "forward": "forward"}[rows[0]["pass"]]
            plot(found, f"One MoE layer, {passes}, {rows[0]['tokens']} tokens per rank, {rows[0]['gpu']}", options.plot)
            print(f"plot: {options.plot}")
    except (ScalingError, PlotError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: --plot must be a file that can be written, got {options.plot}: {error.strerror}", file=sys.stderr
        )
        return 2
    return 0


if __name__ == "__main__":
    end_with(main)
