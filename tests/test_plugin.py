"""A third party's kernel: a package of its own, installed, found and audited by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import numdev

ROOT = Path(numdev.__file__).parent.parent
EXAMPLE = Path(__file__).parent / "plugin_example"
CASES = """
cases:
  - {name: small, batch: 1, heads: 2, seq_len: 24, head_dim: 16, causal: true}
formats: [bfloat16]
kernels: [{name: example-chunked, rows: 8}, {name: "example_attention:plain"}]
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the example package, installed there by pip without a network."""
    work = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(EXAMPLE, work / "source")  # setuptools builds beside the source
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    target = ["--no-build-isolation", "--target", str(work / "site"), str(source)]
    subprocess.run([*pip, *target], check=True, capture_output=True, timeout=120)
    return work / "site"


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`numdev ARGUMENTS` in a process that sees the installed package."""
    return subprocess.run(
        [sys.executable, "-m", "numdev", *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "OMP_NUM_THREADS": "1"},
        cwd=site.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_an_installed_kernel_is_audited_by_name(installed: Path) -> None:
    """The package's registered kernel, with its option, and its plain function are measured."""
    config = installed.parent / "small.yaml"
    config.write_text(CASES)
    answer = run(installed, "audit", str(config), "--device", "cpu", "--json")
    assert answer.returncode == 0, answer.stderr
    rows = [r for r in json.loads(answer.stdout)["rows"] if r["role"] == "kernel"]
    by_kernel = {r["kernel"]: r for r in rows if r["tensor"] == "out"}
    assert set(by_kernel) == {"example-chunked", "example_attention:plain"}
    assert by_kernel["example-chunked"]["options"] == {"rows": 8}
    for row in by_kernel.values():
        assert row["status"] == "ok"
        assert row["suspicion"] is None
        assert row["floor_ratio"] < 2  # fp32 arithmetic and one rounding


def test_the_tutorials_example(tmp_path: Path) -> None:
    """The plain function of docs/kernels.md has the mistake that the page says numdev names."""
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    blocks = [b.split("```")[0] for b in page.split("```python\n")[1:]]
    (tmp_path / "mine.py").write_text(next(b for b in blocks if "def my_attention" in b))
    config = tmp_path / "small.yaml"
    config.write_text(
        "cases: [{name: s, batch: 1, heads: 2, seq_len: 48, head_dim: 16, causal: true}]"
    )
    audit = ["audit", str(config), "--kernel", "mine:my_attention", "--device", "cpu"]
    answer = run(tmp_path, *audit, "-o", str(tmp_path / "report"))
    assert answer.returncode == 0, answer.stderr
    first = " ".join(answer.stdout.split())
    assert first.startswith(
        "mine:my_attention computes a different function: the causal mask is off by one: each "
        "query sees one key too many (residual"
    )
