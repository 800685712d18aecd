"""matplotlib, where it is installed."""

from typing import Any


class PlotError(RuntimeError):
    """A picture that cannot be drawn. The text says why in one line."""


def load_pyplot(option: str) -> Any:
    """matplotlib.pyplot for a tool whose option asked for a picture.

    Raises:
        PlotError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise PlotError(f"{option} must have matplotlib installed (pip install -e .[plot]), got: {error}") from None
    # Without a display any other backend fails, and nothing is shown here.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
