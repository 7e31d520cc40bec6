"""Findings: each fault once, in a sentence whose every number is a row's, and calm otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gate_rows import control, row

from numdev.cli.main import main
from numdev.gate.findings import findings_of
from numdev.report import DeviationRow, Finding, read


def found(*rows: DeviationRow) -> tuple[Finding, ...]:
    return findings_of(rows)[0]


def sentence(*rows: DeviationRow) -> str:
    (finding,) = found(*rows)
    return finding.sentence


# --- what each says ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"nonfinite": 45056, "tensor": "dq"},
            "mine has 45056 elements of dq that are not finite where the exact result, rounded "
            "once, is (bfloat16; 1 of 2 heads, worst at layer 8 head 3).",
        ),
        (
            {"expected_ratio": 1.32, "tensor": "dv"},
            "mine errs beyond what bfloat16 explains: dv is off by 1.32 x what the kernel's own "
            "roundings predict, and 1.1 x is the limit (bfloat16; 1 of 2 heads, worst at layer 8 "
            "head 3).",
        ),
        (
            {"worst_row": 30.0},
            "mine errs beyond what bfloat16 explains in single rows: one of the output is off by "
            "30 x what is predicted for it, and 5 x is the limit (bfloat16; 1 of 2 heads, worst at "
            "layer 8 head 3).",
        ),
        (
            {"bias_p": 1e-6, "bias_size": 0.26, "bias_of": "sign"},
            "mine is biased: the output lies to one side of the exact result, rounded once, by up "
            "to +0.260 ulp (sign) over 8 sequences; such an error does not average out (bfloat16; "
            "1 of 2 heads, worst at layer 8 head 3).",
        ),
        (
            {"noise": 2e-3},
            "mine is not reproducible: the output changes between runs on the same inputs by 1.77 "
            "x what rounding it once changes, and it should be the same bits (bfloat16; 1 of 2 "
            "heads, worst at layer 8 head 3).",
        ),
        (
            {"suspicion": "the causal mask is ignored", "suspicion_cut": 21.4},
            "mine computes a different function: the causal mask is ignored (residual 21.4 x "
            "smaller against that; 1 of 2 heads, bfloat16; first at layer 8 head 3).",
        ),
    ],
)
def test_sentences(changes: dict[str, Any], said: str) -> None:
    """Kernel, format, tensor, how many heads, the worst place, the number, what it means."""
    place = {"layer": 8, "module": "m.8", "case": "m.8#0"}
    tensor = changes.get("tensor", "out")
    assert sentence(row(0, tensor=tensor), row(3, **place, **changes)) == said


def test_a_finding_is_data_too() -> None:
    """What names the row again, for a reproducer."""
    (finding,) = found(row(0), row(3, case="d", layer=2, call=1, seed=5, expected_ratio=2.5))
    assert finding.place is not None
    assert finding.place.model_dump() == {
        "case": "d", "module": "m", "layer": 2, "call": 1, "head": 3, "phase": None, "seed": 5,
            "step": None,
    }  # fmt: skip
    assert (finding.rule, finding.metric, finding.observed) == ("error", "expected_ratio", 2.5)
    assert (finding.limit, finding.count, finding.judged) == (1.1, 1, 2)
    assert (finding.severity, finding.tensor) == ("exceeded", "out")


def test_the_place_is_where_it_is_worst() -> None:
    """Of two heads beyond the limit the farther one."""
    (finding,) = found(row(0, expected_ratio=1.5), row(1, expected_ratio=9.0))
    assert finding.place is not None
    assert finding.place.head == 1
    assert "worst at layer 0 head 1" in finding.sentence


# --- each fault once -----------------------------------------------------------------------------


def test_one_fault_is_said_once() -> None:
    """A head that breaks several rules is accused by the first; the others are added."""
    bad = {"suspicion": "x", "suspicion_cut": 20.0, "expected_ratio": 300.0, "worst_row": 900.0}
    text = sentence(row(0), row(1, **bad))
    assert "a different function" in text
    assert text.endswith(" These heads fail error and worst row too.")


def test_another_head_is_another_fault() -> None:
    """That one head is explained excuses no other."""
    named = {"suspicion": "x", "suspicion_cut": 20.0, "expected_ratio": 300.0}
    both = found(row(0), row(1, **named), row(2, expected_ratio=5.0))
    assert [f.rule for f in both] == ["function", "error"]
    assert both[1].count == 2
    assert both[0].sentence.endswith("These heads fail error too.")


def test_a_different_function_is_one_fault_in_all_formats() -> None:
    """With the median cut and the heads of all; another cause is another fault."""
    rows = [
        row(h, format=fmt, suspicion="a", suspicion_cut=cut)
        for h, fmt, cut in ((0, "bfloat16", 10.0), (1, "bfloat16", 30.0), (0, "float16", 20.0))
    ]
    first, second = found(*rows, row(1, format="float16", suspicion="b", suspicion_cut=50.0))
    assert "a (residual 20 x smaller against that; 3 of 4 heads, bfloat16, float16" in (
        first.sentence
    )
    assert first.formats == ("bfloat16", "float16")
    assert "b (residual 50 x" in second.sentence


def test_the_default_dispatch_joins_what_it_ran() -> None:
    """Two kernels with the same numbers are one finding, said of the first."""
    rows = [row(h, kernel=k, expected_ratio=1.0 + h) for k in ("flash", "default") for h in (0, 1)]
    (finding,) = found(*rows)
    assert finding.sentence.startswith("flash (and default, with the same numbers) errs beyond")
    assert (finding.kernel, finding.also) == ("flash", ("default",))
    assert len(found(*rows, row(2, kernel="default", expected_ratio=9.0))) == 2


# --- calls that did not run ----------------------------------------------------------------------


def test_failing_and_refusing() -> None:
    """A failure is a finding, declining some calls a note at the end, declining all nothing."""
    rows = [
        row(0),
        row(None, case="d", status="skipped", reason="no soft cap"),
        row(0, kernel="breaks"),
        row(None, kernel="breaks", case="d", status="failed", reason="RuntimeError: x"),
        row(None, kernel="cuda", status="skipped", reason="needs CUDA"),
    ]
    assert [(f.severity, f.sentence) for f in found(*rows)] == [
        ("unmeasured", "breaks failed in 1 of 2 calls (bfloat16): RuntimeError: x."),
        ("note", "mine refuses 1 of 2 calls (bfloat16): no soft cap."),
    ]


def test_where_a_kernel_failed() -> None:
    """The first call in which it did, and in which pass; declining has no place."""
    rows = [
        row(0, kernel="breaks"),
        row(None, kernel="breaks", case="d", layer=3, status="skipped", reason="no soft cap"),
        row(None, kernel="breaks", case="e", layer=4, status="failed", reason="x"),
        row(None, kernel="breaks", case="f", layer=5, status="failed", reason="y"),
        row(0, kernel="trains", tensor="dq", case="e"),
        row(None, kernel="trains", tensor="dq", case="f", layer=5, status="failed", reason="z"),
        row(0),
        row(None, case="d", status="skipped", reason="no soft cap"),
    ]
    forward, backward, note = found(*rows)
    assert (forward.kernel, forward.tensor, backward.kernel, backward.tensor) == (
        "breaks", "out", "trains", "dq",
    )  # fmt: skip
    assert forward.place is not None
    assert backward.place is not None
    assert (forward.place.case, forward.place.layer, forward.place.head) == ("e", 4, None)
    assert (backward.place.case, backward.place.layer) == ("f", 5)
    assert (note.severity, note.tensor, note.place) == ("note", None, None)


# --- a sound kernel's page is calm ---------------------------------------------------------------


def test_no_finding_is_one_line() -> None:
    """Who was judged by what, and what could not be judged, with the reason."""
    rows = [row(h, sequences=4, noise=None) for h in range(3)]
    findings, tested = findings_of(rows)
    assert findings == ()
    assert tested == (
        "No finding: mine in bfloat16, 3 rows, by finiteness, function, error and worst row. Not "
        "judged: typical head (heads: 3, and it takes 8); bias (independent sequences: 4, and it "
        "takes 8); reproducibility (not measured); log-sum-exp (nothing here to apply it to).",
    )


def test_a_rule_that_was_applied_in_part_says_so() -> None:
    """And with a finding the line does not say that there is none."""
    findings, tested = findings_of([row(0), row(1, noise=None), row(2, nonfinite=1)])
    assert len(findings) == 1
    assert tested[0].startswith("Judged: mine")
    assert "reproducibility (in part: not measured)" in tested[0]


def test_nothing_measured_says_nothing() -> None:
    """Not "no finding"."""
    assert findings_of([row(None, status="skipped", reason="needs CUDA")]) == ((), ())
    assert findings_of([]) == ((), ())


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


# --- of real audits ------------------------------------------------------------------------------

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
        ("nans", "finiteness", "128 elements of the output that are not finite"),
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


def test_a_truncated_cast_is_found(audited: Any) -> None:
    """By its bias, since truncation always errs toward zero; by its size as well where what is
    expected of the kernel was measured."""
    (finding,) = [f for f in audited.findings if f.kernel == "planted_faults:truncates"]
    assert finding.rule in ("error", "bias")
    assert "bias" in finding.sentence
