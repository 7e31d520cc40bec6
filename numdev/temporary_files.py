"""Temporary files and folders of which none stays, even where their process was killed.

The process that writes one locks it for as long as the process lives. `remove_stale`
removes those that no process has locked; it runs before the next one is made in the same
place."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl

SUFFIX = ".unfinished"


@contextmanager
def unfinished_file(path: Path) -> Iterator[Path]:
    """Yields the path of a new, empty file in the folder of `path`. At the end it takes
    the name `path` (mode 644), in place of an older file. After an exception it is
    removed, and an older file stays. Raises OSError, which names `path`, where the folder
    does not exist or cannot be written to, and where `path` is a folder. An OSError of
    the system in the body comes out as one that names `path` too. Removes first what
    killed processes left in the folder."""
    remove_stale(path.parent)

    def create() -> str:
        """Makes the file and returns its name."""
        handle, name = tempfile.mkstemp(SUFFIX, f".{path.name}.", path.parent)
        os.close(handle)
        return name

    try:
        with _locked_path(create) as partial:
            try:
                yield partial
                partial.chmod(0o644)
                partial.replace(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
    except OSError as error:  # it names the temporary file, which nobody asked for
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def temporary_folder(
    parent: Path | None = None, prefix: str = "numdev-"
) -> Iterator[Path]:
    """Yields the path of a new, empty folder in `parent`, which must exist (None: the
    system's place for temporary files). Its name begins with `prefix`. It is removed at
    the end unless it was renamed. Removes first what killed processes left there under
    this prefix. Raises OSError where it cannot be made."""
    place = Path(tempfile.gettempdir()) if parent is None else parent
    remove_stale(place, prefix)
    with _locked_path(lambda: tempfile.mkdtemp(SUFFIX, prefix, place)) as path:
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def remove_stale(place: Path, prefix: str = ".") -> None:
    """Removes from a directory what killed processes left: files and folders named
    `prefix`...SUFFIX that no process has locked. What cannot be opened, locked or
    removed, such as another user's, and symbolic links stay; on Windows all do."""
    for path in place.glob(f"{glob.escape(prefix)}*{SUFFIX}"):
        # It is another user's, or another process was faster
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if not _try_lock(handle, wait=False):
                    continue
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
            finally:
                os.close(handle)


@contextmanager
def _locked_path(create: Callable[[], str]) -> Iterator[Path]:
    """Yields the path of a new file or folder, locked until the end where the system can.
    `create` makes it and returns its name; it is called again where another process
    removed it before it was locked."""
    while True:
        path = Path(create())
        handle = os.open(path, os.O_RDONLY)
        try:
            _try_lock(handle, wait=True)
            if not _is_still_at(handle, path):
                continue  # it was taken for stale before it was locked
            yield path
            return
        finally:
            os.close(handle)


def _is_still_at(handle: int, path: Path) -> bool:
    """Whether the open file is still the one at this path."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False


def _try_lock(handle: int, *, wait: bool) -> bool:
    """Locks an open file until it is closed, and returns whether that succeeded. `wait`:
    waits for another process that has it; else False at once. False on Windows and on
    file systems without locks."""
    if sys.platform == "win32":
        return False
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return True
    return False
