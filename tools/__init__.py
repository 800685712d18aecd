"""Command lines around the recipe. Each is run as `python -m tools.NAME`."""
