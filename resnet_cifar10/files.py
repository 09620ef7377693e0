"""Files and folders: written whole or not at all, and refused early where they cannot be written."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def make_folder(folder: Path) -> None:
    """Make ``folder``, unless it is there, and make sure that files can be written to it.

    Raises:
        ValueError: they cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}") from error


def flush(path: Path) -> None:
    """Make sure that a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """A path beside ``path`` for its new content: it takes its place at the end of the block, if that succeeds.

    Raises:
        OSError: the block, or taking its place, has raised one; the message names ``path``.
    """
    new = path.with_name(f".new_{os.getpid()}")
    try:
        yield new
        flush(new)
        new.replace(path)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        new.unlink(missing_ok=True)
