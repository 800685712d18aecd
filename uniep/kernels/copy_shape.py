"""How many rows and columns a program copies at once."""

import triton

# Tokens of a send task, behind one fence.
CHUNK_TOKENS = 32
# Elements of one step of a copy: 32 a thread at 8 warps, four 16-byte loads in flight.
_STEP_ELEMENTS = 8192
_MAX_COLS = 2048
_MAX_ROWS = 32


def copy_shape(dim: int) -> tuple[int, int]:
    """(rows, columns) of a step. Columns divide D if a useful power of two does, else the last step is masked."""
    cols = min(dim & -dim, _MAX_COLS)
    if cols < 128:
        cols = min(triton.next_power_of_2(dim), _MAX_COLS)
    return min(_STEP_ELEMENTS // cols, _MAX_ROWS), cols
