"""Room for the rows of a layer, which is made before the host knows how many come."""

from uniep.plan.layout import HeapLayout

# After so many forwards that left more than a quarter of the room unused, it becomes smaller.
FORWARDS_BEFORE_SHRINKING = 128


class Room:
    """For how many rows one layer's dispatch allocates its outputs: what came before, and a sixteenth more.

    A layer has its own, for layers are loaded differently and each keeps its rows until its backward.
    """

    def __init__(self, layout: HeapLayout) -> None:
        self._layout = layout
        self._most_rows = self._num_forwards = 0
        self.num_rows = 0

    def begin(self, num_tokens: int) -> int:
        """The rows to allocate for a forward of so many tokens: before the first, those of balanced routing."""
        if not self.num_rows:
            self.num_rows = self._with_spare(num_tokens * self._layout.shape.top_k)
        return self.num_rows

    def follow(self, num_rows: int) -> None:
        """Takes note of the R rows of a forward; if they had no room, they have it from now on."""
        self._most_rows = max(self._most_rows, num_rows)
        self._num_forwards += 1
        shrinks = self._num_forwards == FORWARDS_BEFORE_SHRINKING
        if num_rows > self.num_rows or (shrinks and 4 * self._most_rows < 3 * self.num_rows):
            self.num_rows = self._with_spare(self._most_rows)
        if shrinks:
            self._most_rows = self._num_forwards = 0

    def _with_spare(self, num_rows: int) -> int:
        tile_rows = self._layout.tile_rows
        wanted = -(-(num_rows + num_rows // 16) // tile_rows) * tile_rows
        return max(min(wanted, self._layout.max_rows), 1)
