"""The predicted time of a launch, in microseconds, for many configurations at once. docs/autotuner.md has the formulas.

Bytes over GB/s are nanoseconds; every bandwidth is turned into bytes a microsecond where it is looked up.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import numpy as np

from uniep.autotune.hardware import COMBINES, DISPATCHES, TILES, Floats, Hardware, Ints
from uniep.autotune.workload import TILE_ROWS, Workload

_BYTES = 2  # of a bf16 element
_BYTES_PER_US = 1e3  # of 1 GB/s
# Rows that the dispatch sends behind one fence, and most columns that a relay copies at once: uniep.kernels.copy_shape.
_CHUNK_TOKENS = 32
_MAX_COPY_COLS = 2048
# Columns, rows and rows a step of a tile of the weight gradients: uniep.kernels.wgrad.
_WGRAD_F, _WGRAD_D, _WGRAD_STEP = 128, 256, 32
# Programs that end one after another leave, on average, half a tile's time at the end.
_TAIL_TILES = 0.5
# Columns of the tile that epilogue_us is for.
_EPILOGUE_COLS = 256
# What the exchange sends with: uniep.kernels.exchange_routing.
_EXCHANGE_PROGRAMS, _EXCHANGE_WARPS = 16, 4
# Products of R x D x F that a forward and its backward have computed when a step begins and when it ends.
_PRODUCTS = {"up": (0, 2), "down": (2, 3), "down_grad": (3, 4), "wgrad": (4, 7), "up_grad": (7, 9)}

# The steps of a layer that take time, in their order. "wgrad" holds the gradient of the scores, which runs before it.
FORWARD = ("exchange", "plan", "up", "down")
BACKWARD = ("down_grad", "wgrad", "up_grad")


@dataclass(frozen=True)
class Candidates:
    """Configurations of one launch, a column an attribute, all of one length.

    Attributes:
        tile: index into TILES.
        num_warps: of a program.
        num_link: programs that begin with the link: num_dispatch, or num_combine.
        num_local: programs that begin with local copies: num_relay, or those that are set apart for reducing (our
            kernels set none apart: 0).
        shared: what all launches of a configuration must have in common; equal numbers go together.
    """

    tile: Ints
    num_warps: Ints
    num_link: Ints
    num_local: Ints
    shared: Ints

    def __len__(self) -> int:
        return len(self.tile)

    def take(self, rows: Ints) -> "Candidates":
        return Candidates(*(getattr(self, f.name)[rows] for f in fields(self)))


@dataclass(frozen=True)
class Prediction:
    """Microseconds of each candidate.

    Attributes:
        terms: name -> what it adds. The sum is the launch's time; infinite where a configuration cannot run.
        alone: name -> what a resource would need by itself, beside the others. For people to read.
    """

    terms: Mapping[str, Floats]
    alone: Mapping[str, Floats]

    @property
    def total_us(self) -> Floats:
        return np.add.reduce(list(self.terms.values()))


def overlap(first: Floats | float, second: Floats | float, share: Floats | float) -> Floats:
    """Two things beside each other: the longer, and the share of the shorter that nothing hides."""
    return np.maximum(first, second) + share * np.minimum(first, second)


def predict(
    launch: str, work: Workload, hardware: Hardware, candidates: Candidates, *, staged: bool = False
) -> Prediction:
    """Args:
    launch: one of TUNED.
    staged: combine sends rows through num_link programs instead of straight from the GEMM's epilogue.
    """
    if launch in DISPATCHES:
        return _dispatch(launch, work, hardware, candidates)
    return _combine(launch, work, hardware, candidates, staged)


def _num_experts_with_rows(work: Workload) -> float:
    """Of a rank's, the mean number that some token of any rank chooses; of the others no weight is read."""
    shape = work.shape
    not_chosen = (1.0 - shape.top_k / shape.num_experts) ** (work.num_tokens * shape.ep_degree)
    return shape.num_local_experts * (1.0 - not_chosen)


@dataclass(frozen=True)
class _Gemm:
    """The grouped GEMM of a launch for each candidate: tiles, programs of the launch, and tiles that one program
    finishes a microsecond while all are busy."""

    num_tiles: Floats
    num_programs: Ints
    tiles_per_us: Floats

    def alone_us(self, num_programs: Ints) -> Floats:
        """Infinite without a program."""
        with np.errstate(divide="ignore"):
            return self.num_tiles / (num_programs * self.tiles_per_us)


def _heat(step: str, work: Workload, hardware: Hardware) -> float:
    """Tensor Cores take longer by a share of it. A layer begins with a cool GPU; one that has computed for a while
    meets its limit of power and lowers its clock, the further the longer, ever more slowly."""
    tflop = hardware.constants["hot_tflop"]
    product = 2e-12 * work.num_rows * work.shape.dim * work.shape.hidden_dim / tflop
    begin, end = (count * product for count in _PRODUCTS[step])

    def integral(x: float) -> float:
        return (1.0 + x) * math.log1p(x) - x

    # The mean over the step.
    return (integral(end) - integral(begin)) / (end - begin)


def _gemm(
    launch: str, work: Workload, hardware: Hardware, candidates: Candidates, out_cols: int, depth: int, io_bytes: float
) -> _Gemm:
    """io_bytes: what the launch must read and write at least, operands and results."""
    constants = hardware.constants
    block_n, block_k, occupancy = (
        np.array([getattr(tile, what) for tile in TILES.values()], dtype=float)
        for what in ("block_n", "block_k", "occupancy")
    )
    num_col_tiles = np.ceil(out_cols / block_n)
    num_tiles = work.num_row_tiles * num_col_tiles
    # Columns past the end are computed, but not stored; nor are rows, which matters where an epilogue does little else.
    epilogue_us = constants[f"{launch}.epilogue_us"] * out_cols / (num_col_tiles * _EPILOGUE_COLS)
    if launch in COMBINES:
        epilogue_us = epilogue_us * work.num_rows / (work.num_row_tiles * TILE_ROWS)
    # Of two programs on a multiprocessor one's epilogue runs beside the other's products, and they take less power.
    beside = occupancy > 1
    epilogue_us = np.where(beside, constants["beside_share"], 1.0) * epilogue_us
    tile_us = np.ceil(depth / block_k) * hardware.steps_us(launch) + epilogue_us
    hot_share = np.where(beside, constants["beside_hot_share"], constants["hot_share"])
    tile_us = tile_us * (1.0 + hot_share * _heat(launch, work, hardware))
    # The device memory serves the tiles meanwhile.
    compute_us = np.maximum(num_tiles / hardware.num_multiprocessors, 1.0) * tile_us
    memory_us = io_bytes / (hardware.memory_gbs * _BYTES_PER_US)
    tile_us = tile_us * overlap(compute_us, memory_us, constants["memory_share"]) / compute_us
    # tile_us is a multiprocessor's time: of two programs on it, each takes twice as long.
    tiles_per_us = 1.0 / (tile_us * occupancy)
    num_programs = hardware.num_multiprocessors * occupancy.astype(np.int64)
    return _Gemm(num_tiles[candidates.tile], num_programs[candidates.tile], tiles_per_us[candidates.tile])


def _relayed_at_send(capacity: Floats, rows_of_token: float) -> Floats:
    """Share of the rows that are relayed when the last token comes.

    Tokens come in the order of the first expert that wants them, and an expert's rows need also tokens that came for
    earlier ones: when a share s of the tokens is there, 1 - (1 - s)^(1 / k) of the rows are complete, k being the rows
    of a token. Relaying follows that curve until it grows faster than programs copy, then goes on at their rate.

    Args:
        capacity: share of the rows that the programs copy in the time of sending.
    """
    k = max(rows_of_token, 1.0 + 1e-6)
    left = np.maximum(k * capacity, 1.0) ** (-k / (k - 1.0))
    return np.minimum(1.0 - left ** (1.0 / k) + capacity * left, 1.0)


def _row_parts(dim: int) -> int:
    """Parts of a row that a relay copies one by one: uniep.kernels.copy_shape."""
    cols = dim & -dim
    return 1 + (dim - 1) // min(cols if cols >= 128 else dim, _MAX_COPY_COLS)


def _dispatch(launch: str, work: Workload, hardware: Hardware, candidates: Candidates) -> Prediction:
    shape, constants = work.shape, hardware.constants
    dim, hidden_dim, rows = shape.dim, shape.hidden_dim, work.num_rows
    weights = _num_experts_with_rows(work) * dim * hidden_dim
    if launch == "up":
        # g and u side by side; x is read, g, u and h are written.
        gemm = _gemm(
            launch, work, hardware, candidates, 2 * hidden_dim, dim,
            _BYTES * (rows * (dim + 3 * hidden_dim) + 2 * weights),
        )  # fmt: skip
    else:
        # grad_y, g and u are read; grad_g, grad_u and h are written.
        gemm = _gemm(
            launch, work, hardware, candidates, hidden_dim, dim, _BYTES * (rows * (dim + 5 * hidden_dim) + weights)
        )
    num_link, num_local, num_warps = candidates.num_link, candidates.num_local, candidates.num_warps
    row_bytes = dim * _BYTES
    one = np.ones_like(num_link)
    # A program copies a chunk, then fences and sets flags, while the link serves others.
    chunk_bytes = _CHUNK_TOKENS * row_bytes
    link_rate = constants["send_share"] * _BYTES_PER_US * hardware.link.at(num_link, num_warps)
    alone_us = chunk_bytes / (_BYTES_PER_US * hardware.link.at(one, num_warps)) + constants["chunk_us"]
    chunk_us = np.maximum(chunk_bytes * num_link / link_rate, alone_us)
    send_us = work.num_sent / _CHUNK_TOKENS * chunk_us / num_link
    # A relay's reads are mostly in the second-level cache: the programs do not slow each other down.
    copy_rate = constants[f"{launch}.relay_share"] * _BYTES_PER_US * hardware.copy.at(one, num_warps)
    program_rate = row_bytes / (row_bytes / copy_rate + _row_parts(dim) * constants["row_part_us"])
    most_rate = hardware.memory_gbs * _BYTES_PER_US
    early_rate = np.minimum(num_local * program_rate, most_rate)
    late_rate = np.minimum((num_local + num_link) * program_rate, most_rate)
    # A short tile takes as long as a full one.
    tile_bytes = 2 * TILE_ROWS * row_bytes
    relay_bytes = work.num_row_tiles * tile_bytes
    # A rank's first rows: one chunk of each sender and one tile of each relay.
    first_us = np.minimum(chunk_us, send_us) + tile_bytes * num_local / early_rate
    # Relaying: with num_local programs while others send, then with both; never done before the last rows are there.
    rows_of_token = work.num_returned / work.num_sent if work.num_sent else 1.0
    share_at_send = _relayed_at_send(early_rate * send_us / relay_bytes, rows_of_token)
    ready_us = np.maximum(send_us + (1.0 - share_at_send) * relay_bytes / late_rate, first_us)
    # Computing: what is ready, at most what the remaining programs can do. Of a queue with a constant server, what is
    # done by the end is the least over the corners of what came: all of it, or busy since a corner.
    computing = (gemm.num_programs - num_link - num_local) * gemm.tiles_per_us
    done = np.minimum(
        gemm.num_tiles,
        np.minimum(
            share_at_send * gemm.num_tiles + computing * np.maximum(ready_us - np.maximum(send_us, first_us), 0.0),
            computing * (ready_us - first_us),
        ),
    )
    after_us = (gemm.num_tiles - done) / (gemm.num_programs * gemm.tiles_per_us)
    return Prediction(
        {
            "launch": np.full(len(candidates), constants["launch_us"]),
            "until all rows lie": np.where(computing > 0, ready_us, np.inf),
            "compute after": after_us,
            # The last rows still need a whole tile.
            "tail": np.maximum(_TAIL_TILES / gemm.tiles_per_us, 1.0 / gemm.tiles_per_us - after_us),
        },
        {
            "send": send_us,
            "relay": relay_bytes / late_rate,
            "first rows": first_us,
            "compute": gemm.alone_us(gemm.num_programs),
        },
    )


def _combine(launch: str, work: Workload, hardware: Hardware, candidates: Candidates, staged: bool) -> Prediction:
    shape, constants = work.shape, hardware.constants
    dim, hidden_dim, rows = shape.dim, shape.hidden_dim, work.num_rows
    num_products = 1 if launch == "down" else 2
    weights = num_products * _num_experts_with_rows(work) * dim * hidden_dim
    gemm = _gemm(
        launch, work, hardware, candidates, dim, num_products * hidden_dim,
        _BYTES * (rows * (num_products * hidden_dim + dim) + weights),
    )  # fmt: skip
    num_link, num_local = candidates.num_link, candidates.num_local
    computing = gemm.num_programs - num_link - num_local
    compute_us = np.maximum(gemm.alone_us(np.maximum(computing, 0)), (1.0 - _TAIL_TILES) / gemm.tiles_per_us)
    link_bytes = work.num_returned * dim * _BYTES
    if staged:
        link_us = link_bytes / (_BYTES_PER_US * hardware.link.at(num_link, candidates.num_warps))
        both_us = overlap(compute_us, link_us, 0.0)
    else:
        link_us = np.full(len(candidates), link_bytes / (_BYTES_PER_US * constants["link_gbs"]))
        both_us = overlap(compute_us, link_us, hardware.link_shares()[candidates.tile])
    # Row tiles whose marks the num_link programs have not yet looked at when the others come to help.
    unseen = np.maximum(work.num_row_tiles - num_link * both_us / constants["mark_us"], 0.0)
    # T*K rows are read where they came, T are written.
    reduce_bytes = work.num_tokens * (shape.top_k + 1) * dim * _BYTES
    reduce_rate = constants["reduce_share"] * hardware.memory_gbs * _BYTES_PER_US
    # Programs set apart for it reduce while the GEMM waits for the link, or the link for the GEMM.
    early_bytes = np.zeros(len(candidates))
    if num_local.any() and work.num_returned:
        apart = num_local > 0
        rate = hardware.copy.at(num_local[apart], candidates.num_warps[apart]) * _BYTES_PER_US
        early_bytes[apart] = rate * np.abs(compute_us - link_us)[apart]
    late_bytes = np.maximum(reduce_bytes - early_bytes, 0.0)
    return Prediction(
        {
            "launch": np.full(len(candidates), constants["launch_us"]),
            "compute and link": np.where(computing > 0, both_us, np.inf),
            "tail": _TAIL_TILES / gemm.tiles_per_us,
            "marks": (unseen / gemm.num_programs + 1.0) * constants["mark_us"],
            "reduce": late_bytes / reduce_rate,
        },
        {
            "compute": gemm.alone_us(gemm.num_programs),
            "link": link_us,
            "reduce": np.full(len(candidates), reduce_bytes / reduce_rate),
        },
    )


def fixed_us(step: str, work: Workload, hardware: Hardware) -> Mapping[str, float]:
    """The terms of a step without a configuration: "exchange", "plan", "wgrad", or "scores", the part of wgrad that is
    the gradient of the scores. The sum is its time."""
    return _FIXED[step](work, hardware)


def _exchange(work: Workload, hardware: Hardware) -> dict[str, float]:
    # Ids and scores, 4 bytes each, to every other rank.
    sent_bytes = 8 * work.num_tokens * work.shape.top_k * (work.shape.ep_degree - 1)
    gbs = hardware.link.at(np.array([_EXCHANGE_PROGRAMS]), np.array([_EXCHANGE_WARPS]))
    return {
        "launch": hardware.constants["exchange.fixed_us"],
        "send": sent_bytes / (_BYTES_PER_US * float(gbs[0])),
    }


def _plan(work: Workload, hardware: Hardware) -> dict[str, float]:
    # Three passes over the ids of all ranks, and a copy of their scores.
    read_bytes = 20 * work.num_tokens * work.shape.top_k * work.shape.ep_degree
    constants = hardware.constants
    return {"launches": constants["plan.fixed_us"], "passes": read_bytes / (_BYTES_PER_US * constants["plan.gbs"])}


def _wgrad(work: Workload, hardware: Hardware) -> dict[str, float]:
    shape, constants = work.shape, hardware.constants
    dim, hidden_dim, num_local = shape.dim, shape.hidden_dim, shape.num_local_experts
    num_tiles = 3 * num_local * -(-hidden_dim // _WGRAD_F) * -(-dim // _WGRAD_D)
    # An expert's last step is half empty on average.
    num_steps = work.num_rows / num_local / _WGRAD_STEP + 0.5
    tile_us = num_steps * constants["wgrad.step_us"] + constants["wgrad.tile_us"]
    tile_us *= 1.0 + constants["hot_share"] * _heat("wgrad", work, hardware)
    compute_us = num_tiles * tile_us / hardware.num_multiprocessors
    io_bytes = _BYTES * (work.num_rows * (2 * dim + 3 * hidden_dim) + 3 * num_local * dim * hidden_dim)
    memory_us = io_bytes / (_BYTES_PER_US * hardware.memory_gbs)
    return {
        "launch": constants["launch_us"],
        "weights": float(overlap(compute_us, memory_us, constants["memory_share"])),
        "tail": _TAIL_TILES * tile_us,
        # On a stream of its own, but it comes first, and the weights' programs take whole multiprocessors.
        "scores": _scores(work, hardware)["read"],
    }


def _scores(work: Workload, hardware: Hardware) -> dict[str, float]:
    read_bytes = _BYTES * work.num_tokens * (work.shape.top_k + 1) * work.shape.dim
    constants = hardware.constants
    # Alone, as a calibration times it, the host's launch is a part of it.
    return {"launch": constants["scores.fixed_us"], "read": read_bytes / (_BYTES_PER_US * constants["scores.gbs"])}


_FIXED: dict[str, Callable[[Workload, Hardware], dict[str, float]]] = {
    "exchange": _exchange,
    "plan": _plan,
    "wgrad": _wgrad,
    "scores": _scores,
}
