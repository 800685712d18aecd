"""The MoE layers of benchmarks/moe_shapes.toml, by their names."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from uniep.shapes import MoEShape, ShapeError

_FILE = Path(__file__).parents[1] / "benchmarks/moe_shapes.toml"


@dataclass(frozen=True)
class Layer:
    name: str
    shape: MoEShape
    num_tokens: int
    """Of a rank."""


def named_shapes(
    names: Sequence[str] | None = None, *, ep_degree: int, num_experts: int | None = None
) -> dict[str, MoEShape]:
    """The shapes of these names, or all of them, each cut to at most so many experts.

    Raises:
        ShapeError: there is no such layer, or --ep or --experts does not fit one of them.
    """
    known = {m["name"]: m for m in tomllib.loads(_FILE.read_text())["moe"]}
    names = list(known) if names is None else names
    if unknown := sorted(set(names) - known.keys()):
        raise ShapeError(f"--shape must be of {', '.join(known)}, got {', '.join(unknown)}")
    most = max(known[name]["E"] for name in names)
    if num_experts is not None and num_experts > most:
        raise ShapeError(f"--experts must be at most the {most} of the layers, got {num_experts}")
    found = {}
    for name in names:
        m = known[name]
        try:
            found[name] = MoEShape(min(m["E"], num_experts or m["E"]), m["K"], m["D"], m["F"], ep_degree)
        except ShapeError as error:
            given = "--ep" if num_experts is None else "--ep and --experts"
            raise ShapeError(f"{given} must fit the layer {name}: {error}") from None
    return found
