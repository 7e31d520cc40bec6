"""What `numdev --version` says: the version, the commit where one is known, and the
versions of what computes. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path

import numdev


def version_line() -> str:
    """Returns `numdev 0.1.0 (commit 1a2b3c4d), torch 2.13.0, Python 3.12.1`; without the
    brackets where no commit is known, and with `torch not installed` where it is not."""
    commit = commit_of_source() or commit_of_install()
    known_commit = f" (commit {commit})" if commit else ""
    return (
        f"numdev {numdev.__version__}{known_commit}, torch {_version('torch')}, "
        f"Python {platform.python_version()}"
    )


def commit_of_source() -> str:
    """Returns the commit, in eight digits or more, of the source tree that numdev runs
    from, with `+` where tracked files differ from it; empty where it runs from no such
    tree, or git does not answer."""
    root = Path(numdev.__file__).parent.parent
    if not (root / ".git").exists():
        return ""
    commit = _git(root, "rev-parse", "--short=8", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+" if commit and changed else commit


def _git(root: Path, *words: str) -> str:
    """Returns what git prints, without blanks and line ends around it; empty where it is
    not there, fails, or takes more than 5 s."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit_of_install() -> str:
    """Returns the first eight digits of the commit that pip installed from, of a
    repository; empty where it installed from elsewhere."""
    try:
        text = importlib.metadata.distribution("numdev").read_text("direct_url.json")
        commit = json.loads(text or "{}").get("vcs_info", {}).get("commit_id", "")
    except (importlib.metadata.PackageNotFoundError, ValueError, AttributeError):
        return ""
    return str(commit)[:8]


def _version(package: str) -> str:
    """Returns the version of an installed package; `not installed` without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
