"""The JSON of a benchmark: its figures, and what they were measured on."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from recipes.records import commit, versions
from uniep.files import replace_text


def write_benchmark(path: Path, module: str, argv: Sequence[str], figures: Mapping[str, Any]) -> None:
    """figures, and GPU, versions, commit, command and date."""
    measured_on = {
        "gpu": torch.cuda.get_device_name(),
        "versions": versions(),
        "commit": commit(),
        "command": " ".join(["python -m", module, *argv]),
        "date": time.strftime("%Y-%m-%d"),
    }
    replace_text(path, json.dumps({**figures, **measured_on}, indent=1) + "\n")
