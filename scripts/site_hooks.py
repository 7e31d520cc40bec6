"""What the site has beyond docs/: the README as its first page, and results that pages link to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
RESULTS = "benchmarks/results"


def on_files(files: Files, config: Any) -> Files:
    """The pages of docs/, README.md, and everything in benchmarks/results."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=inside(readme, "docs/")))
    for path in sorted((ROOT / RESULTS).iterdir()):
        files.append(
            File.generated(config, f"{RESULTS}/{path.name}", content=path.read_text("utf-8"))
        )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its links to results, and those of results to docs/, as the site has them."""
    results = page.file.src_uri.startswith(RESULTS)
    return markdown.replace("(../../docs/", "(../../") if results else inside(markdown, "../")


def inside(markdown: str, prefix: str) -> str:
    """The text with `prefix` off the front of every relative link, and of every `src`."""
    return re.sub(rf'(\]\(|src="){re.escape(prefix)}', r"\1", markdown)
