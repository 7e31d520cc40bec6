"""What a checkpoint, a folder or another file is called in a report."""

from __future__ import annotations

from pathlib import Path


def name_of(path: Path) -> str:
    """Returns the last name of a path, links followed; for a snapshot in Hugging Face's
    cache, the model's name: `owner/model`, or `model` without an owner. A file of that
    cache is stored under its hash: for one, returns the name of the link."""
    whole = path.resolve()
    if whole.is_file() and whole.parent.name == "blobs":
        return path.name
    model = whole.parents[1].name if whole.parent.name == "snapshots" else ""
    return model.partition("--")[2].replace("--", "/") or whole.name
