"""Where a verdict shows besides the terminal: files, and GitHub."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from numdev.errors import UsageError

if TYPE_CHECKING:
    from numdev.gate.rules import Rules
    from numdev.gate.verdict import Judgement
    from numdev.report import Finding


@dataclass(frozen=True, kw_only=True)
class Places:
    """Which of them are asked for: --junit, --summary, --github."""

    junit: Path | None
    summary: Path | None
    github: bool

    def write(
        self, judged: Judgement, findings: Sequence[Finding], tested: Sequence[str], *,
        rules: Rules, file: Path,
    ) -> list[str]:  # fmt: skip
        """The files, and GitHub's summary at the end of what the step has written there already.
        What is left is to be printed: annotations. `file` is where the rules were read from."""
        from numdev.report.renderers.github import commands, summary
        from numdev.report.renderers.junit import junit
        from numdev.report.views.gate import spots_of

        spots = spots_of(rules, file) if self.junit or self.github else {}
        if self.junit:
            write_file(self.junit, junit(judged, findings, spots))
        if self.summary:
            write_file(self.summary, summary(judged, findings, tested))
        if not self.github:
            return []
        if step := os.environ.get("GITHUB_STEP_SUMMARY"):
            with Path(step).open("a", encoding="utf-8") as stream:
                stream.write(summary(judged, findings, tested))
        root = Path(os.environ.get("GITHUB_WORKSPACE") or ".")
        return list(commands(judged, findings, spots, root))

    @contextlib.contextmanager
    def printing(self) -> Iterator[None]:
        """GitHub takes nothing for a command that is printed in here, until it reads a word that
        nobody can guess: sentences hold names that come from elsewhere."""
        if not self.github:
            yield
            return
        word = secrets.token_hex(16)
        click.echo(f"::stop-commands::{word}")
        try:
            yield
        finally:
            click.echo(f"::{word}::")


def write_file(path: Path, text: str) -> None:
    """A file that is whole or not there, in a directory that need not be there. Raises UsageError
    where it cannot be written."""
    from numdev.report import replacing

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written ({error.strerror})", hint="give another file"
        ) from error
