"""Foreign text, such as the names of layers and kernels, made harmless for where it is
shown.

Whoever writes a checkpoint or a report chooses these names. In a terminal they could be
escape sequences, in a spreadsheet formulas. HTML is escaped by its template, Markdown by
its renderer."""

from __future__ import annotations

import json

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""What a spreadsheet takes for the start of a formula."""


def plain(text: str, keep: str = "") -> str:
    """Returns text with each character that is not printable (ANSI escapes, marks of
    direction, odd blanks) spelled out as Python escapes it, but for those in `keep`."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode()
        for c in text
    )


def csv_cell(value: object) -> object:
    """Returns a value as a cell of a CSV file: a dict as JSON, and text that a
    spreadsheet would compute (FORMULA) with an apostrophe before it. In text, characters
    that are not printable, but tabs and line ends, are spelled out. Other values stay."""
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, str):
        value = plain(value, keep="\t\r\n")
        return f"'{value}" if value.startswith(FORMULA) else value
    return value


def json_text(text: str) -> str:
    """Returns JSON text with each character that is not printable, but for tabs and line
    ends, as JSON's escape for it: safe in a terminal, and the same data."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in " \t\r\n" else json.dumps(c)[1:-1] for c in text
    )
