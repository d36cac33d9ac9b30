"""A file of JSON objects, one a line, that a run adds to and a later run goes on with.

A run may be killed at any moment: what it had appended is there, and a last line it did not finish
is dropped by the next. While it runs no other process may add to the file.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kimi_jax import locks

ReadRow = Callable[[bytes], str]
"""The id of a row; raises what is wrong with it as a `ValueError`."""


class ResumableLines:
    """Rows with an id each, read back or appended.

    What is appended is on its way to the disk when `append` returns.

    Args:
        path: the file, new or left by an earlier run.
        read: called with every whole line that is there.
        header: the first line of a file that has one; it is written where the file is new, and
            whether an old one fits is for the caller to check.

    Raises:
        ValueError: what `read` raises, with the file and line, or an id used twice; or another
            process is adding to the file.
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path, read: ReadRow, *, header: dict[str, Any] | None = None):
        self.path = Path(path)
        self._places: dict[str, int] = {}
        # Opened as it is, and made where it is not there: what another has begun must stand.
        self._file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            if not locks.take(self._file.fileno()):
                raise ValueError(
                    f"{self.path}: another process is adding to it; wait for its end, or take "
                    "another file"
                )
            end = self._scan(read, num_header_lines=int(header is not None))
        except BaseException:
            self._file.close()
            raise
        self._file.seek(end)
        self._file.truncate()
        if end == 0 and header is not None:
            self._write(header)

    def __contains__(self, id: str) -> bool:
        return id in self._places

    def __len__(self) -> int:
        return len(self._places)

    def append(self, id: str, row: dict[str, Any]) -> None:
        """Writes one row."""
        if id in self._places:
            raise ValueError(f"{self.path}: the id {id!r} is in it already")
        self._places[id] = self._write(row)

    def row(self, id: str) -> dict[str, Any]:
        """The row with this id, read back."""
        self._file.seek(self._places[id])
        row = json.loads(self._file.readline())
        self._file.seek(0, os.SEEK_END)
        return row

    def close(self) -> None:
        """Ends the writing."""
        self._file.close()

    def _scan(self, read: ReadRow, num_header_lines: int) -> int:
        """Takes in the rows that are there; where the last whole one ends."""
        end = 0
        for number, line in enumerate(self._file):
            if not line.endswith(b"\n"):
                if not (line + b'"').startswith(b'{"'):
                    raise ValueError(f"{self.path}: not a file of JSON objects")
                break
            if number >= num_header_lines:
                where = f"{self.path}, line {number + 1}"
                try:
                    id = read(line)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from None
                if id in self._places:
                    raise ValueError(f"{where}: the id {id!r} is used before")
                self._places[id] = end
            end += len(line)
        return end

    def _write(self, row: dict[str, Any]) -> int:
        place = self._file.tell()
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        return place
