"""The sentences of an answer, and what stands out in them."""

from __future__ import annotations

import re

_HEAD = re.compile(r"(?P<head>(?:\([^()]*\)|[^()])*?:) (?P<rest>.*)", re.DOTALL)


def headed(sentence: str) -> tuple[str, str]:
    """What it is about, up to the first `: ` outside of brackets, and the rest; of a sentence
    without one all, and nothing."""
    found = _HEAD.fullmatch(sentence)
    return (found["head"], found["rest"]) if found else (sentence, "")
