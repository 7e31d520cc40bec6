"""`numdev invariance`: what breaks along one axis is named, what does not is called the same."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import invariance_kernels
import pytest
import torch
import yaml
from commands import ran

from numdev.audit.bench import part, settled
from numdev.cases import AttentionCase, CaseRef
from numdev.config import AXES, InvarianceRequest
from numdev.formats import format_named
from numdev.invariance import axes
from numdev.invariance.differences import differs, exact_change
from numdev.invariance.report import InvarianceReport
from numdev.invariance.study import invariance
from numdev.kernels.reference import gradients
from numdev.report import read, write
from numdev.sources.regimes import Shapes, draw
from numdev.testing import CheckFailed, check_attention

CASE = {
    "name": "c", "heads": 2, "kv_heads": 2, "seq_len": 64, "head_dim": 32, "causal": True,
    "batch": 2,
}  # fmt: skip

SHAPES = Shapes(batch=2, heads=4, kv_heads=2, q_len=40, kv_len=40, head_dim=8, v_dim=16)
ROOT = Path(__file__).parent.parent


def studied(path: Path, *kernels: Any, cases: Any = (CASE,), **more: Any) -> InvarianceReport:
    request = InvarianceRequest(target="t", cases=cases, kernels=kernels, logits=False, **more)
    return invariance(request, path)


def moved(rows: Any) -> set[tuple[str, str]]:
    """The axes and variants along which the output has other bits."""
    return {(r.axis, r.variant) for r in rows if r.differ}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: Any) -> set[tuple[str, str]]:
    """Where tiles that begin at other keys change a kernel that otherwise changes nothing."""
    return moved(studied(tmp_path_factory.mktemp("s"), "invariance_kernels:sound").rows)


@cache
def tokens(text: str) -> str:
    return {"split": "in 4 splits", "tile": "32 keys a tile in one split", "both": "in 2 splits",
            "order": "the last first,", "whole": "keys a tile in one split"}[text]  # fmt: skip


SWITCHES = [
    f"{axis}_{cut}"
    for axis, cuts in {
        "batch": "split tile order both whole", "heads": "split tile order",
        "rows": "split tile order both", "longer": "tile order whole",
        "chunks": "tile order both whole", "decode": "split tile order both whole",
        "mask": "split tile order", "strides": "split order both", "paged": "split order tile",
        "threads": "split tile order",
    }.items()
    for cut in cuts.split()
]  # fmt: skip


@pytest.mark.parametrize("kernel", SWITCHES)
def test_a_tiling_that_depends_on_one_axis_is_named(tmp_path, sound, kernel):
    """The axis, and no other; the two ways to cut the keys; no finding, since both are sound."""
    report = studied(tmp_path, f"invariance_kernels:{kernel}")
    axis, _, cut = kernel.partition("_")
    rows = [r for r in report.rows if (r.axis, r.variant) not in sound]
    assert {r.axis for r in rows if r.differ} == {axis}
    words = [str(r.cause) for r in rows if r.cause is not None]
    assert words
    assert any("16 keys a tile" in text and tokens(cut) in text for text in words), words
    assert not report.findings


BROKEN = {
    "noisy": "repeat", "shared_maximum": "neighbours", "reads_beyond": "beyond",
    "reads_before": "beyond", "reads_hidden": "hidden", "last_row_unwritten": "unwritten",
    "last_head_unwritten": "unwritten", "first_sequence_unwritten": "unwritten",
    "cast_in_decode": "decode", "cast_in_chunks": "chunks", "lacks_a_key_in_decode": "decode",
    "other_mask": "mask", "same_memory": "mask", "leak": "neighbours", "one_row": "batch",
    "wrong_lse": "batch", "rarely": "repeat",
}  # fmt: skip


@pytest.mark.parametrize("kernel", BROKEN)
def test_a_kernel_that_is_wrong_along_one_axis_is_found(tmp_path, kernel):
    """One finding, of the axis from which all others follow, and a verdict."""
    report = studied(tmp_path, f"invariance_kernels:{kernel}")
    assert [f.rule.split()[0] for f in report.findings] == [BROKEN[kernel]]
    assert report.outcome == "exceeded"
    assert report.verdicts[0].finding == 0
    if BROKEN[kernel] in ("beyond", "unwritten"):  # it is NaN that comes out
        assert report.findings[0].rule == f"{BROKEN[kernel]} finite"
    if BROKEN[kernel] in ("decode", "chunks", "mask"):  # no tiling makes such a difference
        assert not [r for r in report.rows if r.axis == BROKEN[kernel] and r.cause is not None]


def test_a_dependence_hides_no_graver_one(tmp_path):
    """An ulp from call to call explains an ulp along other axes, not another answer."""
    report = studied(tmp_path, "invariance_kernels:noise_and_batch", axes=["repeat", "batch"])
    assert [f.rule for f in report.findings] == ["repeat bitwise", "batch rounding"]
    invariance_kernels.counted[:] = [1]
    poisoned = studied(tmp_path / "p", "invariance_kernels:noise_beside_nan", axes=["hidden-nan"])
    assert [f.rule for f in poisoned.findings] == ["repeat bitwise"]


def test_what_is_no_answer_is_not_judged(tmp_path):
    """NaN at every call changes along no axis, and is no pass; a dtype without arithmetic is one
    that can be compared; a call too large for a machine, and an axis that is not for it, say so."""
    large = {**CASE, "heads": 64, "kv_heads": 64, "seq_len": 600}
    nan = studied(tmp_path / "n", "invariance_kernels:always_nan", axes=["batch"])
    assert (nan.outcome, nan.measured) == ("unmeasured", False)
    assert "NaN or infinite where the exact result is not" in nan.findings[0].sentence
    bits = studied(tmp_path / "b", "invariance_kernels:eight_bits", axes=["batch", "padding"])
    assert bits.outcome == "passed"
    assert not any(r.differ for r in bits.rows if r.axis == "batch")
    few = studied(tmp_path / "l", "sdpa-math", axes=["batch", "graph"], cases=[large])
    reasons = {r.variant: r.reason for r in few.rows if r.reason}
    assert "are more than are computed for it here" in reasons["64 in place of 2"]
    assert reasons["CUDA graph"] == "needs CUDA, but this run is on CPU"
    assert few.rows[0].elements == 2 * 600 * 32  # of the first kv head


def test_sound_kernels_keep_their_bits(tmp_path):
    """Fixed tiles and plain attention, forward and backward: the same along every axis but where
    tiles begin at other keys; and no finding."""
    fixed = {"name": "emulated", "options": {"block_kv": 32}}
    cases = [CASE, {**CASE, "name": "d", "seq_len": 1, "kv_len": 100, "causal": False}]
    report = studied(tmp_path, fixed, "sdpa-math", cases=cases, backward=True)
    assert not report.findings
    assert len(report.rows) > 800
    left_out = {"lengths", "padding", "tiles", "hidden-nan"}
    gemm = {"strides", "paged"}  # a matrix product may sum in another order in another layout
    for name, but in (("emulated", left_out), ("sdpa-math", {"hidden-nan"} | gemm)):
        assert not moved(r for r in report.rows if r.kernel == name and r.axis not in but), name
    assert {r.tensor for r in report.rows} == {"out", "lse", "dq", "dk", "dv"}
    names = {r.variant for r in report.rows if r.axis == "tiles" and r.differ}
    assert {"block_kv=64", "splits=2"} <= names


def test_every_axis_keeps_the_exact_answer():
    """Each variant of calls of many kinds, with gradients, in fp64; nothing is left out."""
    drawn = draw("normal", SHAPES, seed=0, label="", options={}, gradients=True)
    dO = torch.randn(SHAPES.out, generator=torch.Generator().manual_seed(1))
    base = dict(zip("qkv", drawn, strict=True), grad_out=dO, scale=0.3)
    plain = AttentionCase(ref=CaseRef(case="c"), **base)
    made = torch.rand(40, 40, generator=torch.Generator().manual_seed(0)) > 0.3
    made.fill_diagonal_(True)
    last = dataclasses.replace(
        plain, q=plain.q[:, :, -8:], grad_out=plain.grad_out[:, :, -8:], is_causal=True,
        causal_offset=32,
    )  # fmt: skip
    one = dataclasses.replace(plain, q=plain.q[:, :, :1], grad_out=plain.grad_out[:, :, :1])
    cases = {
        "plain": plain, "causal": dataclasses.replace(plain, is_causal=True), "last": last,
        "window": dataclasses.replace(plain, is_causal=True, window=(9, 0)), "one": one,
        "mask": dataclasses.replace(plain, mask=made),
        "bias": dataclasses.replace(plain, mask=made.float().log()[None, None]),
        "soft": dataclasses.replace(plain, softcap=2.0, sinks=torch.ones(4)),
    }  # fmt: skip
    seen = set()
    for case in map(settled, cases.values()):
        for name, variants in axes.VARIANTS.items():
            for variant in (x for x in variants(case) if not x.reason):
                base_case = case if variant.base is None else variant.base
                exact = gradients(base_case)
                for call in variant.calls:
                    change = exact_change(call, exact, gradients(call.case))
                    assert change <= 1e-10, (name, variant.name)
                seen.add(name)
    assert seen == axes.VARIANTS.keys()


def test_an_axis_that_changes_the_answer_judges_nobody(tmp_path, monkeypatch):
    """It is said, and nothing is measured."""

    def wrong(case: Any) -> Any:
        yield axes.again("doubled", dataclasses.replace(case, v=case.v * 2))

    monkeypatch.setitem(axes.VARIANTS, "repeat", wrong)
    report = studied(tmp_path, "sdpa-math", axes=["repeat"])
    assert not report.measured
    assert "the exact answer changes by 1" in report.unmeasured


def test_bits_are_compared_as_they_are():
    """-0 is not 0, NaN is NaN, and numbers of two dtypes go by their value."""
    a = torch.tensor([0.0, math.nan, 1.0, 2.0])
    b = torch.tensor([-0.0, math.nan, 1.0, 2.0000002])
    assert differs(a, b).tolist() == [True, False, False, True]
    assert not differs(a, a.double()).any()
    assert differs(a, b.double()).tolist() == [True, False, False, True]


def test_numbers_of_a_row(tmp_path):
    """A thousandth more in one row of one head: its place, its share, its size in floors and ulps;
    a row by itself sees what it saw."""
    (tmp_path / "one.py").write_text(
        "from numdev.kernels import find\n"
        "def kernel(case):\n"
        "    out = find('emulated').attend(case, preset='exact').out.float()\n"
        "    if case.q.shape[0] == 8:\n"
        "        out[1, 1, 5] *= 1.001\n"
        "    return out\n"
    )
    report = studied(
        tmp_path / "r", f"{tmp_path}/one.py:kernel", axes=["batch"], formats=["float32"]
    )
    row = next(r for r in report.rows if r.variant == "8 in place of 2")
    assert (row.elements, row.differ, row.first[:3], row.keys) == (8192, 32, (1, 1, 5), 6)
    assert 8e3 < row.ulps < 1.7e4  # 1e-3 of 2^23 to 2^24 ulps
    assert row.floor_ratio > 100
    assert [f.rule for f in report.findings] == ["batch rounding"]


RULES = {"name": "mine", "invariance": {"bitwise": ["decode"]}}


def test_the_gate_judges_a_report_by_other_rules(tmp_path, capsys, monkeypatch):
    """The default passes what a stricter file refuses; exit codes, JUnit and JSON say so, and a
    finished run is not measured again."""
    monkeypatch.chdir(tmp_path)
    request = {"cases": [CASE], "kernels": ["invariance_kernels:decode_split"],
               "axes": ["repeat", "decode"]}  # fmt: skip
    Path("cases.yaml").write_text(yaml.safe_dump(request))
    Path("rules.yaml").write_text(yaml.safe_dump(RULES))
    code, out, err = ran(capsys, "invariance", "cases.yaml", "-o", "r", "--gate")
    assert code == 0, err
    journal = Path("r/rows.jsonl").read_text()
    assert ran(capsys, "invariance", "cases.yaml", "-o", "r")[0] == 0
    assert Path("r/rows.jsonl").read_text() == journal
    whole = read(Path("r"))
    Path("r/rows.jsonl").write_text("".join(journal.splitlines(keepends=True)[:4]))
    assert ran(capsys, "invariance", "cases.yaml", "-o", "r")[0] == 0
    assert read(Path("r")).rows == whole.rows  # causes too, though less was left to do
    assert ran(capsys, "gate", "r")[0] == 0
    gate = ("gate", "r", "--thresholds", "rules.yaml", "--junit", "j.xml")
    code, out, err = ran(capsys, *gate, "--json")
    told = json.loads(out)
    assert (code, told["outcome"], told["rules"]) == (1, "exceeded", "mine")
    assert [t["rule"] for t in told["tests"] if t["standing"] == "exceeded"] == ["decode bitwise"]
    assert re.search(r"against 16 keys a tile", told["findings"][0]["sentence"])
    assert 'failures="1"' in Path("j.xml").read_text()
    report = read(Path("r"))
    assert isinstance(report, InvarianceReport)
    assert report.to_pandas()["axis"].nunique() == 2
    Path("rules.yaml").write_text("invariance: {bitwise: [batch]}")
    code, out, _ = ran(capsys, "gate", "r", "--thresholds", "rules.yaml")
    assert code == 3  # a rule on an axis that the report has not
    assert "batch is not judged:" in out
    Path("rules.yaml").write_text("invariance: {bitwise: [decoding]}")
    code, _, err = ran(capsys, "gate", "r", "--thresholds", "rules.yaml")
    assert code == 2
    assert "there is no axis 'decoding'; did you mean 'decode'?" in err


def test_two_reports_are_compared(tmp_path, capsys, monkeypatch):
    """Bits that were the same and are no longer are named, with the cause; the same say so."""
    monkeypatch.chdir(tmp_path)
    for name, kernel in (("a", "sound"), ("b", "batch_split")):
        code = f"import invariance_kernels as k\ndef mine(case): return k.{kernel}(case)\n"
        Path("changing.py").write_text(code)
        sys.modules.pop("changing", None)
        report = studied(tmp_path / name, f"{tmp_path}/changing.py:mine", axes=["batch", "order"])
        write(report, tmp_path / name)
    code, out, _ = ran(capsys, "compare", "a", "b")
    assert code == 1
    assert "the same bits, now 0." in out
    assert "16 keys a tile in 4 splits" in " ".join(out.split())
    assert ran(capsys, "compare", "a", "a")[0] == 0


def test_a_finding_has_a_script(tmp_path, capsys, monkeypatch):
    """It shows the finding by itself, along its axis alone, and ends with 1."""
    monkeypatch.chdir(tmp_path)
    request = {"cases": [CASE], "kernels": ["invariance_kernels:cast_in_decode"],
               "axes": ["repeat", "decode"]}  # fmt: skip
    Path("cases.yaml").write_text(yaml.safe_dump(request))
    assert ran(capsys, "invariance", "cases.yaml", "-o", "r")[0] == 0
    (script,) = Path("r/reproducers").glob("*/reproduce.py")
    assert script.parent.name == read(Path("r")).findings[0].folder
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run([sys.executable, script], env={**os.environ, "PYTHONPATH": path},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout.strip() == read(Path("r")).findings[0].sentence


def test_a_check_holds_a_function_to_axes(tmp_path):
    """The door for pytest: what keeps its bits passes, what does not names axis and cause."""
    how = {"cases": {**CASE, "name": "mine"}, "formats": "bfloat16", "backward": False,
           "claims": {"block_kv": 16}, "reproducers": tmp_path}  # fmt: skip
    assert check_attention(invariance_kernels.sound, invariant=["batch", "decode"], **how).passed
    with pytest.raises(CheckFailed, match=r"depends on whether a row is\s+decoded") as failed:
        check_attention(invariance_kernels.cast_in_decode, invariant="decode", **how)
    assert failed.value.result.verdict == "FAIL"
    with pytest.raises(CheckFailed, match=r"the function takes no\s+mask") as failed:
        check_attention(invariance_kernels.no_mask, invariant=["mask"], **how | {"claims": None})
    assert failed.value.result.verdict == "NOT JUDGED"


def test_an_fp8_cache_parts_at_the_first_length_with_two_tiles(tmp_path):
    """Where P has 8 bits, the running maximum under which each is rounded decides it: a decode step
    that walks 16 keys a tile from the last one parts from a prefill of 32 keys a tile at 17 keys,
    the first length of which one form makes two tiles. The cause says the tiles and the order."""
    report = studied(tmp_path, "invariance_kernels:fp8_cache", axes=["decode"])
    words = {str(r.cause) for r in report.rows if r.cause is not None and r.keys > 33}
    assert words == {
        "explained by tiling: 32 keys a tile in one split against 16 keys a tile, the last first, "
        "in one split"
    }
    q, k, v = draw("normal", SHAPES, seed=0, label="", options={})
    case = AttentionCase(ref=CaseRef(case="c"), q=q, k=k, v=v, scale=0.3, is_causal=True)
    case = case.rounded_to(format_named("bfloat16"))
    whole = invariance_kernels.fp8_cache(case)
    parted = []
    for length in range(1, 25):
        one = part(case, row=range(length - 1, length), key=range(length))
        step = invariance_kernels.fp8_cache(axes.without_positions(one))
        parted.append(bool(differs(whole[:, :, length - 1 : length], step).any()))
    assert parted.index(True) == 16


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints(capsys, monkeypatch, tmp_path):
    """The example of docs/invariance.md is of this kind: tables, columns, axes and sentences."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "118")
    page = (ROOT / "docs" / "invariance.md").read_text()
    line = re.search(r"^numdev (invariance demo --layers.*)$", page, re.MULTILINE)[1]
    code, out, _ = ran(capsys, *line.split(), "-o", "r")
    assert code == 0
    shown = re.search(r"```text\n(.*?)```", page, re.DOTALL)[1]
    for word in re.findall(r"[A-Za-z][\w'-]+", shown):
        assert word in out, word
    for axis in AXES:
        assert f"| `{axis}` |" in page, axis


@pytest.mark.gpu
def test_every_axis_runs_on_a_gpu(tmp_path):
    """Nothing fails, the exact answers agree, and a CUDA graph is an axis."""
    cases = [CASE, {**CASE, "name": "d", "seq_len": 1, "kv_len": 100, "causal": False}]
    kernels = ("sdpa-math", "sdpa-flash", "sdpa-efficient", "emulated")
    report = studied(tmp_path, *kernels, cases=cases, device="cuda", backward=True)
    assert not [r.reason for r in report.rows if r.status == "failed"]
    assert not [r.reason for r in report.rows if "exact answer" in (r.reason or "")]
    assert not report.findings
    graphs = studied(tmp_path / "g", *kernels, cases=cases, device="cuda", axes=["graph"])
    assert {r.status for r in graphs.rows} == {"ok"}
