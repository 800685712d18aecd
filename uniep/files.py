"""Files that are whole or not there."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Writes a file, or leaves it as it was if the process ends meanwhile.

    Raises:
        OSError: it cannot be written.
    """
    # Ranks and runs may write the same file at once.
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
