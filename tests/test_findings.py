"""Findings: each fault once, in a sentence whose every number is a row's, and calm otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gate_rows import control, findings_of, planned, row

from numdev.cli.main import main
from numdev.gate import findings as gate_findings
from numdev.gate.rules import Rules
from numdev.report import DeviationRow, Finding, read


def found(*rows: DeviationRow) -> tuple[Finding, ...]:
    return findings_of(rows)[0]


def sentence(*rows: DeviationRow) -> str:
    (finding,) = found(*rows)
    return finding.sentence


def test_what_would_have_been_caught() -> None:
    """The smallest dose of each planted fault; and those that nothing catches."""
    rows = [
        row(),
        control("scale", 0.01, 1.0),
        control("scale", 0.03, 4.0),
        control("tail", 1, 1.0),
        control("tail", 64, 1.0),
    ]
    findings, tested = findings_of(rows)
    assert findings == ()
    assert tested[1] == (
        "Of faults planted here, these rules catch: scale (bfloat16) from 0.03; tail (bfloat16) at "
        "no dose up to 64."
    )


def test_a_finding_stands_where_it_is_worst() -> None:
    """Not where it was met first or last."""
    (finding,) = found(*(row(h, expected_ratio=x) for h, x in enumerate((2.0, 9.0, 3.0))))
    assert finding.place is not None
    assert (finding.place.head, finding.observed, finding.count) == (1, 9.0, 3)
    assert "head 1" in finding.sentence


def test_a_kernel_that_no_rule_applies_to_is_not_judged() -> None:
    """In its own line: where no row sees a key there is nothing that could pass."""
    for elements, outcome in ((10_000, "passed"), (0, "unmeasured")):
        rows = [row(elements=elements)]
        (verdict,) = gate_findings.findings_of(rows, planned(rows)).verdicts
        assert verdict.outcome == outcome


def test_gradients_inherit_a_wrong_output() -> None:
    """They are no findings beside it, but are where the output is right."""
    wrong = row(suspicion="the scale is 1", suspicion_cut=50.0, expected_ratio=9.0)
    (finding,) = found(wrong, row(tensor="dq", expected_ratio=9.0))
    assert finding.sentence.endswith("Its gradients inherit that.")
    assert [f.tensor for f in found(row(), row(tensor="dq", expected_ratio=9.0))] == ["dq"]


@pytest.mark.parametrize(
    ("metric", "at_most", "words"),
    [
        ("baseline_ratio", 2, "has 3× the error of eager attention in the output (limit 2×;"),
        ("expected_ratio", 0.5, "has 1× the error in the output that its rounding model predicts"),
        ("worst_row", 1.1, "has a row of the output with 1.2× the error predicted for it (limit"),
        ("mean_abs", 3e-5, "breaks the rule mine in the output: 9e-5, mean_abs ≤ 3e-5"),
    ],
)
def test_words_follow_the_metric_of_the_rule(metric: str, at_most: float, words: str) -> None:
    """Number and limit, in the words of the metric."""
    limit = {"name": "mine", "metric": metric, "at_most": at_most}
    sized = row(baseline_ratio=3.0, expected_ratio=1.0, worst_row=1.2, mean_abs=9e-5)
    ((finding,), _) = findings_of([sized], Rules.model_validate({"thresholds": [limit]}))
    assert finding.sentence.startswith(f"mine {words}")


KERNELS = """
import torch
import torch.nn.functional as F

def sound(q, k, v, is_causal=False, scale=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)

def nans(q, k, v, is_causal=False, scale=None):
    out = sound(q, k, v, is_causal, scale)
    out[2, 1, 5:9] = float("nan")
    return out

def halved(q, k, v, is_causal=False, scale=None):
    return sound(q, k, v, is_causal, scale / 2)

def truncates(q, k, v, is_causal=False, scale=None):
    out = sound(q.float(), k.float(), v.float(), is_causal, scale)
    return (out.view(torch.int32) & -65536).view(torch.float32).to(q.dtype)

def raises(q, k, v, is_causal=False, scale=None):
    raise RuntimeError("not today")
"""


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every kernel of the file above, on 8 sequences, in bfloat16."""
    folder = tmp_path_factory.mktemp("audited")
    (folder / "planted_faults.py").write_text(KERNELS)
    (folder / "c.yaml").write_text(
        "cases: [{name: c, batch: 8, heads: 2, seq_len: 64, head_dim: 32, causal: true, "
        "inputs: {name: normal, logits: 2}}]\n"
    )
    names = ("sound", "nans", "halved", "truncates", "raises")
    chosen = [part for name in names for part in ("--kernel", f"planted_faults:{name}")]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        main(["audit", str(folder / "c.yaml"), "-o", str(folder / "o"), "-q", *chosen])
    return read(Path(folder / "o"))


@pytest.mark.parametrize(
    ("name", "rule", "words"),
    [
        ("nans", "finiteness", "returns 128 elements of the output that are NaN or infinite"),
        ("halved", "function", "the scale is"),
        ("raises", "runs", "failed in 1 of 1 calls (bfloat16): RuntimeError: not today"),
        ("sound", None, ""),
    ],
)
def test_planted_faults_are_found(audited: Any, name: str, rule: str | None, words: str) -> None:
    """Each by its own rule, in the stored report; the sound kernel by none."""
    mine = [f for f in audited.findings if f.kernel == f"planted_faults:{name}"]
    assert [f.rule for f in mine] == ([rule] if rule else [])
    assert all(words in f.sentence for f in mine)
