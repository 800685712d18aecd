"""The tile table of a padding-free grouped GEMM.

A tile is TILE_ROWS consecutive rows of one expert, the last one of an expert what is left of it. No row is padded: a
tile that reads past its expert's end reads the next expert's rows and never stores them. Tiles go by expert, then by
row, which is the order in which every rank computes them and therefore the order in which its peers send.
"""

import torch
from torch import Tensor


def max_num_tiles(max_rows: int, num_local_experts: int, tile_rows: int) -> int:
    """The most tiles that max_rows rows make, however they fall: each expert may end in one short tile."""
    return max_rows // tile_rows + num_local_experts


def tile_table_ref(expert_offsets: Tensor, tile_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The table of an expert layout.

    Args:
        expert_offsets: int32 [L + 1], first row of each local expert, R at the end.
        tile_rows: rows of a full tile.

    Returns:
        tile_offsets [L + 1] (first tile of each expert, their number at the end), and for each tile its local expert,
        its first row and the row after its last, all int32.
    """
    num_rows_L = expert_offsets.diff()
    num_tiles_L = (num_rows_L + tile_rows - 1) // tile_rows
    tile_offsets = torch.cat([num_tiles_L.new_zeros(1), num_tiles_L.cumsum(0)]).to(torch.int32)
    tile_expert = torch.repeat_interleave(torch.arange(len(num_tiles_L)), num_tiles_L)
    index_in_expert = torch.arange(len(tile_expert)) - tile_offsets[tile_expert]
    first_row = expert_offsets[tile_expert] + index_in_expert * tile_rows
    end_row = torch.minimum(first_row + tile_rows, expert_offsets[tile_expert + 1])
    return tile_offsets, tile_expert.to(torch.int32), first_row.to(torch.int32), end_row.to(torch.int32)
