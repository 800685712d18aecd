"""Choices on disk: one small file for each layer, degree, hardware and set of versions."""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from uniep.autotune.search import Choice
from uniep.files import replace_text
from uniep.shapes import MoEShape

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheKey:
    """What a measured choice depends on, beside the number of tokens.

    Attributes:
        shape: the layer, with its expert-parallel degree.
        hardware: the description's fingerprint.
        versions: of what computes and chooses, name -> version.
        bucket_tokens: tokens of a bucket.
        max_tokens: the most tokens of a rank, for which the last bucket is tuned.
    """

    shape: MoEShape
    hardware: str
    versions: Mapping[str, str]
    bucket_tokens: int
    max_tokens: int

    @property
    def file_name(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def load_choices(folder: Path, key: CacheKey) -> dict[int, Choice]:
    """Bucket -> choice; empty where there is none. A file that cannot be read is ignored, with one line in the log."""
    path = folder / key.file_name
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["key"] != json.loads(json.dumps(asdict(key))):
            raise ValueError(f"key must be {asdict(key)}, got {values['key']}")
        return {int(bucket): Choice.from_json(choice) for bucket, choice in values["buckets"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        logger.warning(f"{path} is not used, the layer is tuned again: {error!r}")
        return {}


def store_choices(folder: Path, key: CacheKey, choices: Mapping[int, Choice]) -> None:
    """Replaces the file as a whole. One rank calls it. If it cannot be written, one line in the log says so."""
    path = folder / key.file_name
    values = {"key": asdict(key), "buckets": {str(bucket): choice.to_json() for bucket, choice in choices.items()}}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(values, indent=1) + "\n")
    except OSError as error:
        logger.warning(f"{path} cannot be written, the next start measures again: {error}")
