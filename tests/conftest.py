"""Prepares the platform before a test imports TorchTitan, which then picks its device."""

import recipes  # noqa: F401
