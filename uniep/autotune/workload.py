"""What one rank has to do in a layer, counted: the numbers that the cost model needs of a routing."""

import math
from dataclasses import dataclass

from uniep.shapes import MoEShape

# Rows of a GEMM tile, uniep.plan.layout's default.
TILE_ROWS = 128


@dataclass(frozen=True)
class Workload:
    """Of one rank. The expected values are floats.

    Attributes:
        shape: the layer.
        num_tokens: T.
        num_rows: R, routed rows of this rank's experts.
        num_row_tiles: GEMM tiles along the rows, the short ones at the experts' ends included.
        num_sent: tokens that the rank sends, one for each token and other rank that wants it.
        num_returned: rows that it computes for tokens of other ranks.
    """

    shape: MoEShape
    num_tokens: int
    num_rows: float
    num_row_tiles: float
    num_sent: float
    num_returned: float

    @staticmethod
    def balanced(shape: MoEShape, num_tokens: int) -> "Workload":
        """What routing brings on average that gives every expert the same chance."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        num_ranks, num_rows = shape.ep_degree, float(num_tokens * shape.top_k)
        return Workload(
            shape,
            num_tokens,
            num_rows,
            shape.num_local_experts * _tiles_of_expert(shape, num_tokens),
            num_tokens * (num_ranks - 1) * chance_wanted(shape),
            num_rows * (num_ranks - 1) / num_ranks,
        )


def chance_wanted(shape: MoEShape) -> float:
    """That a token goes to some expert of a given rank: 1 - C(E-L, K) / C(E, K). All ranks together want it W times
    that often; with K = 8 of 128 experts and W = 8 about 5.3 times."""
    others = shape.num_experts - shape.num_local_experts
    return 1.0 - math.comb(others, shape.top_k) / math.comb(shape.num_experts, shape.top_k)


def _tiles_of_expert(shape: MoEShape, num_tokens: int) -> float:
    """Expected tiles of an expert: the sum over j of P(rows > j * TILE_ROWS), rows being nearly normal."""
    chance = shape.top_k / shape.num_experts
    trials = num_tokens * shape.ep_degree
    mean, deviation = trials * chance, math.sqrt(trials * chance * (1.0 - chance))
    if deviation == 0.0:
        return float(math.ceil(mean / TILE_ROWS))
    certain = max(math.floor((mean - 8.0 * deviation) / TILE_ROWS), 0)
    tiles = float(certain)
    for j in range(certain, math.ceil((mean + 8.0 * deviation) / TILE_ROWS)):
        # More than j full tiles; half a row, because rows are whole.
        tiles += 0.5 * math.erfc((j * TILE_ROWS + 0.5 - mean) / (deviation * math.sqrt(2.0)))
    return tiles
