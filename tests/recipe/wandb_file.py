"""Reads the file of an offline wandb run: LevelDB's log format, each record a protobuf message."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_BLOCK_BYTES = 32768
_FILE_HEADER = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_records(path: Path) -> Iterator[Record]:
    data = path.read_bytes()
    assert data.startswith(_FILE_HEADER), data[:7]
    offset, whole = len(_FILE_HEADER), b""
    while offset + 7 <= len(data):
        if _BLOCK_BYTES - offset % _BLOCK_BYTES < 7:
            offset += _BLOCK_BYTES - offset % _BLOCK_BYTES
            continue
        num_bytes, kind = struct.unpack_from("<HB", data, offset + 4)
        whole += data[offset + 7 : offset + 7 + num_bytes]
        offset += 7 + num_bytes
        if kind in (_FULL, _LAST):
            yield Record.FromString(whole)
            whole = b""
        else:
            assert kind in (_FIRST, _MIDDLE), kind


def read_history(path: Path) -> list[dict[str, Any]]:
    """What was logged, a dict a call."""
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in read_records(path)
        if record.WhichOneof("record_type") == "history"
    ]


def read_run_ids(path: Path) -> list[str]:
    return [r.run.run_id for r in read_records(path) if r.WhichOneof("record_type") == "run"]
