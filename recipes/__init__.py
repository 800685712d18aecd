"""All that knows TorchTitan 0.2.2: model families, parallelisation, config sections, data, metrics, entry points."""

from recipes.platform import prepare_platform

# Before any module of TorchTitan is imported: it picks its device when `torchtitan.tools.utils` is loaded.
prepare_platform()
