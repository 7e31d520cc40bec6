"""A file that is read while something else is done: where reading takes as long as importing."""

from __future__ import annotations

import threading
from pathlib import Path


class Ahead:
    """Begins to read the file at once, or `report.json` in it where it is a directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = b""
        self._error: Exception | None = None
        self._thread: threading.Thread | None = threading.Thread(target=self._read, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads are to be had
            self._thread = None

    def text(self) -> bytes:
        """All of it, once: it is kept no longer. Raises what reading it raised: OSError."""
        if self._thread is None:
            self._read()
        else:
            self._thread.join()
        if self._error is not None:
            raise self._error
        text, self._text = self._text, b""
        return text

    def _read(self) -> None:
        path = self._path
        try:
            self._text = (path / "report.json" if path.is_dir() else path).read_bytes()
        except Exception as error:  # raised where it is asked for
            self._error = error
