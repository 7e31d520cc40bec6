"""What the site has beyond docs/: the README as its first page, results that pages link
to, and a reference of the Python API made from its signatures and docstrings."""

from __future__ import annotations

import inspect
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
RESULTS = "benchmarks/results"
# By section of the site
SEARCHED = {
    "Start": {"boost": 2},
    "Guides": {"boost": 2},
    "Reproducing the papers": {"boost": 0.5},
    "Contributors": {"boost": 0.3},
}
LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """The pages of docs/, README.md, and everything in benchmarks/results."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=readme))
    for path in sorted((ROOT / RESULTS).iterdir()):
        files.append(
            File.generated(
                config, f"{RESULTS}/{path.name}", content=path.read_text("utf-8")
            )
        )
    files.append(File.generated(config, "python.md", content=reference()))
    return files


def reference() -> str:
    """Every public name of numdev with its signature and docstring."""
    import numdev  # by way of torch, which other pages do not need

    parts = [
        (
            "# Python reference\n\nWritten from the code; [examples](api.md) are a page "
            "of their own.\n"
        )
    ]
    for name in numdev.__all__:
        value = getattr(numdev, name)
        if callable(value):
            header = inspect.getsource(value).partition('"""')[0].rstrip()
            about = inspect.getdoc(value)
            parts.append(f"## numdev.{name}\n\n```python\n{header}\n```\n\n{about}\n")
    return "\n".join(parts)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its relative links as the site has them: to docs/ and results as
    links, to other files of the repository by their path, since the site does not show
    them. A search finds guides first, what reproduces papers and what is for contributors
    last, and no results of benchmarks."""
    uri = page.file.src_uri
    if uri.startswith(RESULTS):
        page.meta["search"] = {"exclude": True}
    elif page.parent is not None and page.parent.title in SEARCHED:
        page.meta["search"] = SEARCHED[page.parent.title]
    source = (
        "README.md"
        if uri == "index.md"
        else uri
        if uri.startswith(RESULTS)
        else f"docs/{uri}"
    )

    def on_site(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (ROOT / path).is_file():
            return link[0]
        if path.startswith(("docs/", RESULTS)):
            place = posixpath.relpath(
                path.removeprefix("docs/"), posixpath.dirname(uri) or "."
            )
            return f"[{text}]({place}{anchor})"
        return f"{text}, `{path}`"

    if uri == "index.md":
        markdown = markdown.replace('<img src="docs/', '<img src="')
    return LINK.sub(on_site, markdown)
