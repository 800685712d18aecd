"""How many rows and columns a program copies at once."""

from uniep.kernels.launch import next_power_of_2

# Tokens of a send task, behind one fence.
CHUNK_TOKENS = 32
_MAX_COLS = 2048
_MAX_ROWS = 32


def copy_shape(dim: int, step_elements: int) -> tuple[int, int]:
    """(rows, columns) of a step. Columns divide D if a useful power of two does, else the last step is masked."""
    cols = min(dim & -dim, _MAX_COLS)
    if cols < 128:
        cols = min(next_power_of_2(dim), _MAX_COLS)
    return min(step_elements // cols, _MAX_ROWS), cols
