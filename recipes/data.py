"""Text to train on: the standard library's sources, local files, and the data sets that TorchTitan knows.

Importing this module adds "stdlib" and "local" to TorchTitan's data sets; its own data loader reads them.
"""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
from datasets.table import CastError
from torchtitan.config import JobConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.tools.logging import logger

from recipes.load import did_you_mean

EMBEDDED = "stdlib"
LOCAL = "local"
# How the `datasets` library reads a file of each suffix.
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text", ".md": "text"}
_HASH_CONTENT_UP_TO_BYTES = 8 << 30
# Records that are looked at before a run, so that the check of a large file takes no time.
_CHECKED_RECORDS = 1000
# A sample of the standard library: about a function.
_PIECE_CHARACTERS = 1500


class DataError(ValueError):
    """Data that cannot be trained on."""


@dataclass(frozen=True)
class DataFingerprint:
    """What a run was trained on.

    Attributes:
        sha256: of names and contents; above 8 GiB of names and sizes; None for a data set that lies on a hub.
        sha256_of: "contents", "names and sizes" or "nothing (remote)".
        tokenizer_sha256: of the tokenizer's files.
    """

    dataset: str
    path: str | None
    sha256: str | None
    sha256_of: str
    tokenizer_sha256: str


def stdlib_files() -> list[tuple[str, Path]]:
    """The running Python's own modules as (name, path), in the order of their names, tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            f for f in subfolders if f not in ("site-packages", "dist-packages", "test", "tests", "__pycache__")
        ]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    named = [(path.relative_to(root).as_posix(), path) for path in files]
    return sorted(named)


def local_files(path: str, key: str = "dataset_path") -> list[Path]:
    """The files behind a path: a file, a folder (searched through), or a glob pattern; in the order of their names.

    Args:
        key: of the config, for errors.

    Raises:
        DataError: nothing there that can be read as text, or files of several kinds.
    """
    where = Path(path)
    if where.is_file():
        found = [where]
    elif where.is_dir():
        found = sorted(p for p in where.rglob("*") if p.suffix in _BUILDERS)
    else:
        found = sorted(Path(p) for p in glob.glob(path, recursive=True) if Path(p).is_file())
    rule = f"{key} must be a file, folder or pattern of {', '.join(_BUILDERS)} files"
    if not found:
        raise DataError(f'{rule}, got "{path}", where there is none')
    kinds = {_BUILDERS.get(p.suffix) for p in found}
    if None in kinds or len(kinds) > 1:
        raise DataError(f'{rule} of one kind, got "{path}" with {sorted({p.suffix or p.name for p in found})}')
    return found


def check_data(job_config: JobConfig, num_readers: int) -> None:
    """Raises DataError where the configured data cannot be found or holds no text. Reads the first texts only.

    Args:
        num_readers: data-parallel ranks, each of which needs a text of its own.
    """
    _check_dataset("training", job_config.training, num_readers)
    if job_config.validation.enable:
        _check_dataset("validation", job_config.validation, num_readers)


def _check_dataset(section: str, options: Any, num_readers: int) -> None:
    name, path = options.dataset.lower(), options.dataset_path
    # TorchTitan's own test data lies in its repository, not in its package.
    known = [n for n in sorted(DATASETS) if n != "c4_test" or Path(path or DATASETS[n].path).is_dir()]
    if name not in known:
        hint = did_you_mean(name, known)
        raise DataError(f'[{section}] dataset must be one of {", ".join(known)}, got "{name}"{hint}')
    if name == EMBEDDED and path:
        raise DataError(
            f'[{section}] dataset_path is read with dataset = "{LOCAL}", got dataset = "{name}" and "{path}"'
        )
    if name != LOCAL:
        return
    if not path:
        raise DataError(f'[{section}] dataset_path must name text files for dataset = "{LOCAL}", got nothing')
    key = f"[{section}] dataset_path"
    files = local_files(path, key)
    try:
        num_texts = 0
        for number, text in enumerate(_texts(key, path, files), start=1):
            num_texts += bool(text.strip())
            if number >= _CHECKED_RECORDS and num_texts >= num_readers:
                break
    except _UNREADABLE as error:
        raise _unreadable(key, path, files, error) from error
    if not num_texts:
        raise DataError(f'{key} must hold text, got "{path}" with none')
    if num_texts < num_readers:
        raise DataError(
            f'{key} must hold a text for each of {num_readers} data-parallel ranks, got "{path}" with {num_texts}'
        )


def fingerprint(job_config: JobConfig) -> DataFingerprint:
    """Hashes the data and the tokenizer of a config."""
    name, path = job_config.training.dataset.lower(), job_config.training.dataset_path
    tokenizer = sorted(p for p in Path(job_config.model.hf_assets_path).glob("*") if p.name in _TOKENIZER_FILES)
    tokenizer_sha256 = _hash_files([(p.name, p) for p in tokenizer])
    if name == EMBEDDED:
        return DataFingerprint(name, path, _hash_files(stdlib_files()), "contents", tokenizer_sha256)
    if name == LOCAL and path:
        files = [(p.name, p) for p in local_files(path)]
        total_bytes = sum(p.stat().st_size for _, p in files)
        if total_bytes <= _HASH_CONTENT_UP_TO_BYTES:
            return DataFingerprint(name, path, _hash_files(files), "contents", tokenizer_sha256)
        digest = hashlib.sha256(repr([(n, p.stat().st_size) for n, p in files]).encode()).hexdigest()
        return DataFingerprint(name, path, digest, "names and sizes", tokenizer_sha256)
    return DataFingerprint(name, path, None, "nothing (remote)", tokenizer_sha256)


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt")


def _hash_files(files: list[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _load_stdlib(path: str) -> datasets.Dataset:
    pieces = []
    for _, file in stdlib_files():
        piece = ""
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            piece += line
            if len(piece) >= _PIECE_CHARACTERS:
                pieces.append(piece)
                piece = ""
        if piece.strip():
            pieces.append(piece)
    # In the order of their hashes, so that a batch mixes pieces of many modules.
    return datasets.Dataset.from_dict({"text": sorted(pieces, key=lambda text: hashlib.sha256(text.encode()).digest())})


def _load_local(path: str) -> datasets.Dataset:
    files = local_files(path)
    try:
        loaded = _open(_filled(files))
        if "text" not in loaded.column_names:
            raise DataError(f'dataset_path must hold records with a "text" field, got "{path}": {loaded.column_names}')
        # Only now are the bytes of a text decoded.
        kept = loaded.filter(lambda text: isinstance(text, str) and bool(text.strip()), input_columns="text")
    except _UNREADABLE as error:
        raise _unreadable("dataset_path", path, files, error) from error
    if len(kept) < len(loaded):
        logger.warning(f"{len(loaded) - len(kept)} of {len(loaded)} records of {path} hold no text and are left out")
    return kept


def _texts(key: str, path: str, files: list[Path]) -> Iterator[str]:
    files = _filled(files)
    if not files:
        return
    if _BUILDERS[files[0].suffix] == "text":
        for file in files:
            yield file.read_text(encoding="utf-8")
        return
    for number, record in enumerate(_open(files, streaming=True), start=1):
        # A record whose text is null is left out, wherever it stands.
        if "text" not in record or not isinstance(record["text"], str | None):
            fields = {name: type(value).__name__ for name, value in record.items()}
            raise DataError(
                f'{key} must hold records with a string in the field "text", got "{path}": record {number} has {fields}'
            )
        yield record["text"] or ""


# What the `datasets` library raises on files that are not what they seem.
_UNREADABLE = (UnicodeError, OSError, pyarrow.ArrowException, datasets.exceptions.DatasetGenerationError, CastError)


def _open(files: list[Path], *, streaming: bool = False) -> Any:
    builder = _BUILDERS[files[0].suffix]
    options: dict[str, Any] = {"sample_by": "document"} if builder == "text" else {}
    # The library takes names as patterns.
    names = [glob.escape(str(file)) for file in files]
    return datasets.load_dataset(builder, data_files=names, split="train", streaming=streaming, **options)


def _filled(files: list[Path]) -> list[Path]:
    """Without files that have no record, which the `datasets` library does not take."""
    return [
        file
        for file in files
        if file.stat().st_size and (file.suffix != ".parquet" or pyarrow.parquet.read_metadata(file).num_rows)
    ]


def _unreadable(key: str, path: str, files: list[Path], error: BaseException) -> DataError:
    """An error that names the file: the first that cannot be read alone, or has other fields than those before it."""
    where = ""
    fields: set[str] | None = None
    for file in files if len(files) > 1 else ():
        try:
            for record in _open(_filled([file]), streaming=True) if _filled([file]) else ():
                fields = fields or set(record)
                if set(record) != fields:
                    raise ValueError(f"has the fields {sorted(record)}, the files before it {sorted(fields)}")
        except (*_UNREADABLE, ValueError) as of_file:
            where, error = f"{file}: ", of_file
            break
    while error.__cause__ is not None:
        error = error.__cause__
    reason = " ".join(str(error).split())[:300]
    return DataError(f'{key} must hold readable text, got "{path}": {where}{reason}')


def _text(sample: dict[str, Any]) -> str:
    return sample["text"]


DATASETS[EMBEDDED] = DatasetConfig(path="the standard library's sources", loader=_load_stdlib, sample_processor=_text)
DATASETS[LOCAL] = DatasetConfig(path="", loader=_load_local, sample_processor=_text)
