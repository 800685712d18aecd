"""Prepares the platform before a test imports TorchTitan, which then picks its device."""

from hypothesis import HealthCheck, settings

import recipes  # noqa: F401

# How long an example takes says how busy the machine is.
settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")
