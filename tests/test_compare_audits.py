"""`numdev compare` as a command: two tiny audits on the CPU, reports by hand, exit codes, pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run as numdev
from compared_reports import audit, floor, head, times
from gate_rows import planned, row
from rich.console import Console
from torch import Tensor

from numdev import report as reports
from numdev.audit.run import audit as study
from numdev.config import AuditRequest, CaseConfig, Choice
from numdev.errors import MeasurementError, UsageError
from numdev.gate.compare import compare
from numdev.gate.compare_report import CompareReport
from numdev.report import AuditReport, Axis, DeviationRow, Finding, SweepReport, SweepSummary, Tick
from numdev.report.renderers import html, terminal

HOSTILE = "<script>alert(1)</script>\x1b[31m[red]{{ 7*7 }}"


# --- kernels as users bring them ------------------------------------------------------------------


def mine(q: Tensor, k: Tensor, v: Tensor, *, off: float = 1.0) -> Tensor:
    """Attention in float32, its third head off by a factor."""
    P = torch.softmax(q.float() @ k.float().mT * q.shape[-1] ** -0.5, dim=-1)
    heads = torch.tensor([1.0, 1.0, off, 1.0])[:, None, None]
    return (P @ v.float() * heads).to(q.dtype)


def fragile(q: Tensor, k: Tensor, v: Tensor, *, sound: bool = True) -> Tensor:
    if not sound:
        raise RuntimeError("illegal memory access")
    return mine(q, k, v)


def run(directory: Path, seed: int = 0, *kernels: Choice) -> Path:
    """A small audit on the CPU, written."""
    chosen = (Choice(name="sdpa-flash"), *kernels)
    cases = (CaseConfig(name="small", batch=2, heads=4, seq_len=48, head_dim=16),)
    request = AuditRequest(
        target="t", cases=cases, kernels=chosen, seed=seed, device="cpu", reproducers=0
    )
    reports.write(study(request, directory), directory)
    return directory


def own(off: float = 1.0) -> Choice:
    return Choice(name="test_compare_audits:mine", options={"off": off})


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Audits of one request: twice the same, one with a fault in head 2, one of another seed."""
    root = tmp_path_factory.mktemp("audits")
    return {
        "a": run(root / "a", 0, own()),
        "again": run(root / "again", 0, own()),
        "planted": run(root / "planted", 0, own(1.03)),
        "seed": run(root / "seed", 1, own()),
    }


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def command(*arguments: object) -> int:
    return numdev("compare", *arguments)


# --- end to end ----------------------------------------------------------------------------------


def test_the_same_audit_twice(audited: dict[str, Path], out: Path) -> None:
    """Exit code 0: the same bits in every row of every kernel, and no change at all."""
    assert command(audited["a"], audited["again"], "-o", out, "--quiet") == 0
    found = reports.read(out)
    assert isinstance(found, CompareReport)
    assert found.summary.answer[0] == "Nothing moved beyond noise; nothing new, nothing gone."
    assert all(g.same_bits == g.pairs == 4 for g in found.groups)
    assert {g.kernel for g in found.groups} == {"baseline", "sdpa-flash", own().name}
    assert found.changes == ()
    assert set(found.summary.inputs) == {"same"}


def test_a_planted_change_is_found_in_its_head(audited: dict[str, Path], out: Path) -> None:
    """Exit code 1, that head and no other, and what else changed; the rest is the same bits."""
    assert command(audited["a"], audited["planted"], "-o", out, "--quiet") == 1
    found = reports.read(out)
    assert isinstance(found, CompareReport)
    assert {(m.kernel, m.tensor, m.place.head) for m in found.moves} == {(own().name, "out", 2)}
    assert f"{own().name}[off=1.03] (bfloat16)" in found.summary.answer[0]
    assert "small head 2, no other function, now the output is 1.030" in found.summary.answer[1]
    grown = next(m for m in found.moves if m.metric in ("expected_ratio", "floor_ratio"))
    assert grown.change is not None
    assert grown.change > 2
    (change,) = found.changes
    assert (change.key, change.a, change.b) == (f"{own().name}: off", "1.0", "1.03")
    same = {g.kernel: g.same_bits for g in found.groups if g.tensor == "out"}
    assert same == {"baseline": 4, "sdpa-flash": 4, own().name: 3}


def test_another_seed_allowed(
    audited: dict[str, Path], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same code on other inputs: nothing moved, and that they differ is said on top."""
    assert command(audited["a"], audited["seed"], "--allow", "seed", "-o", out, "--json") == 0
    assert (out / "report.json").read_text() == capsys.readouterr().out.strip()
    found = reports.read(out)
    assert isinstance(found, CompareReport)
    assert found.summary.answer[1] == "Compared although they differ: seed (0 and 1)."
    assert set(found.summary.inputs) == {"other"}
    assert any("The inputs differ in" in note for note in found.summary.notes)
    assert not any(g.same_bits for g in found.groups if g.kernel != "baseline")


def test_a_kernel_that_fails_now(audited: dict[str, Path], tmp_path: Path, out: Path) -> None:
    """What it had is gone, which is exit code 1; where nothing is gone a failure is 3."""
    name = "test_compare_audits:fragile"
    sound = run(tmp_path / "s", 0, Choice(name=name))
    broken = run(tmp_path / "b", 0, Choice(name=name, options={"sound": False}))
    assert command(sound, broken, "-o", out, "-q") == 1
    found = reports.read(out)
    assert isinstance(found, CompareReport)
    gone, failed = found.presences
    assert (gone.what, gone.rows) == ("gone", 4)
    assert "illegal memory access" in gone.why
    assert (failed.what, failed.why[:5]) == ("failed", "in B:")
    assert command(broken, broken, "-o", tmp_path / "o", "-q") == 3
    assert command(broken, sound, "-o", tmp_path / "p", "-q") == 3


# --- what is comparable --------------------------------------------------------------------------


def written(directory: Path, report: reports.Report) -> Path:
    directory.mkdir(exist_ok=True)
    reports.write(report, directory)
    return directory


def of(tmp_path: Path, a: AuditReport, b: AuditReport, **options: Any) -> CompareReport:
    return compare(written(tmp_path / "a", a), written(tmp_path / "b", b), **options)


OTHER: dict[str, Any] = {
    "checkpoint": "other", "model": "m:f", "text": ["x.txt"], "inputs": "i.safetensors",
    "cases": [{"name": "c"}], "formats": ["float16"], "model_dtype": "bfloat16", "seed": 7,
    "generate": 3, "length": 77, "sequences": 2, "layers": [1], "heads": [0],
    "gradients": False, "sampled_rows": 64, "seeds": [1],
}  # fmt: skip


@pytest.mark.parametrize("key", sorted(OTHER))
def test_every_key_that_must_be_the_same(tmp_path: Path, key: str) -> None:
    """Refused by its name, compared where it is allowed, which is said."""
    a, b = audit(head()), audit(head(), request={key: OTHER[key]})
    with pytest.raises(UsageError, match=f"they differ in {key}.* --allow {key}"):
        of(tmp_path, a, b)
    found = of(tmp_path, a, b, allow=(key,))
    assert [d.root for d in found.allowed] == [key]
    assert found.summary.answer[1].startswith(f"Compared although they differ: {key}")


def test_what_is_no_audit(tmp_path: Path) -> None:
    """Another kind of report is refused; what cannot be read is not compared."""
    a = written(tmp_path / "a", audit(head()))
    found = compare(a, a)
    other = written(tmp_path / "other", found)
    with pytest.raises(UsageError, match="expected a report of an audit or a sweep, got compare"):
        compare(a, other)
    with pytest.raises(UsageError, match="cannot read a report there"):
        compare(a, tmp_path / "nothing")
    (tmp_path / "torn.json").write_text('{"kind": "audit"')
    with pytest.raises(MeasurementError, match="not a report this version understands"):
        compare(a, tmp_path / "torn.json")
    assert command(a, tmp_path / "torn.json") == 3


# --- exit codes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("b", "code"),
    [
        ((head(),), 0),
        ((times(head(), 1.02),), 0),
        ((times(head(), 2.0),), 1),
        ((head(ran="other"),), 1),
        ((row(None, status="skipped", reason="no"),), 1),
        ((head(), head(kernel="new")), 0),
        ((head(), row(None, kernel="new", status="failed", reason="no")), 3),
        ((times(head(), 2.0), row(None, kernel="new", status="failed", reason="no")), 1),
    ],
    ids=["same", "within", "moved", "ran", "gone", "new", "failed", "moved and failed"],
)
def test_exit_codes(tmp_path: Path, b: tuple[DeviationRow, ...], code: int) -> None:
    """1 for what is certain, whatever failed; 3 where something failed and nothing moved."""
    same = head(kernel="same")
    one = written(tmp_path / "a", audit(head(ran="op"), same))
    two = written(tmp_path / "b", audit(same, *(r.model_copy(update=_ran(r)) for r in b)))
    assert command(one, two, "-q", "-o", tmp_path / "o") == code


def _ran(found: DeviationRow) -> dict[str, str]:
    return {"ran": found.ran or "op"} if found.status == "ok" else {}


# --- how it is shown -----------------------------------------------------------------------------


def hostile(tmp_path: Path) -> CompareReport:
    """Names, reasons and paths that would like to be markup."""
    names = {"kernel": HOSTILE, "module": HOSTILE, "case": HOSTILE, "options": {HOSTILE: HOSTILE}}
    finding = Finding(
        rule="r", severity="exceeded", sentence=HOSTILE, kernel=HOSTILE, formats=("bfloat16",),
        count=1, judged=1,
    )  # fmt: skip
    gone = head(kernel="gone" + HOSTILE)
    a = audit(head(**names, ran=HOSTILE), gone)
    b = audit(
        times(head(**names, ran="other" + HOSTILE, suspicion=HOSTILE), 3.0),
        row(None, kernel="gone" + HOSTILE, status="failed", reason=HOSTILE),
        findings=(finding,),
        system={"driver": HOSTILE},
    )
    return of(tmp_path, a, b)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    """No tag on the page, no escape in the terminal, no markup of rich's or jinja's."""
    found = hostile(tmp_path)
    page = html.page(found)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "{{ 7*7 }}" in page
    console = Console(width=200, record=True, force_terminal=False)
    with console.capture() as seen:
        terminal.show(found, console)
    assert "\x1b" not in seen.get()
    assert "[red]" in seen.get()


def test_where_it_is_written(tmp_path: Path, out: Path) -> None:
    """Over the same comparison, never over an audit."""
    a = written(tmp_path / "a", audit(head()))
    assert command(a, a, "-q", "-o", out) == 0
    assert command(a, a, "-q", "-o", out) == 0
    assert command(a, a, "-q", "-o", a) == 2


# --- sweeps ---------------------------------------------------------------------------------------


def swept(*rows: DeviationRow, seeds: tuple[int, ...] = (0, 1), **request: Any) -> SweepReport:
    """A sweep by hand: the rows, and no cells or figures."""
    return SweepReport(
        provenance=audit().provenance,
        request={"cases": [{"name": "c"}], "formats": ["bfloat16"], "seeds": seeds, **request},
        summary=SweepSummary(
            answer=(), seeds=seeds, baseline="baseline",
            axis=Axis(name="x", title="x", scale="linear", ticks=(Tick(x=1, label="1"),)),
        ),
        figures=(),
        cells=(),
        plan=planned(rows),
        rows=rows,
    )  # fmt: skip


def seeded(seeds: tuple[int, ...] = (0, 1), **changes: Any) -> list[DeviationRow]:
    made = [(make, seed, h) for make in (head, floor) for seed in seeds for h in range(4)]
    return [make(h, seed=seed, **(changes if make is head else {})) for make, seed, h in made]


def test_two_sweeps_are_compared_seed_by_seed(tmp_path: Path, out: Path) -> None:
    """The same one has nothing that moved; a head that is off in one seed is found there."""
    rows = seeded()
    bad = [times(r, 1.5) if (r.role, r.seed, r.head) == ("kernel", 1, 2) else r for r in rows]
    a, b = tmp_path / "a", tmp_path / "b"
    for path, these in ((a, rows), (b, bad)):
        path.mkdir()
        reports.write(swept(*these), path)
    assert compare(a, a).exit_code == 0
    found = compare(a, b)
    assert found.exit_code == 1
    assert {(m.place.seed, m.place.head) for m in found.moves} == {(1, 2)}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: swept(*seeded((0, 2)), seeds=(0, 2)), "seeds ([0, 1] in A, [0, 2] in B)"),
        (lambda: swept(*seeded(), formats=["float16"]), "formats"),
        (lambda: swept(*seeded(), cases=[{"name": "c", "seq_len": 9}]), "cases.0.seq_len"),
        (lambda: swept(), "kept cells, and no rows of heads"),
        (lambda: audit(head()), "kind (sweep in A, audit in B); measure the same"),
    ],
)
def test_sweeps_of_something_else_are_refused(tmp_path: Path, make: Any, said: str) -> None:
    """Other seeds, formats or cases, a sweep without rows, an audit."""
    for name, found in (("a", swept(*seeded())), ("b", make())):
        (tmp_path / name).mkdir()
        reports.write(found, tmp_path / name)
    with pytest.raises(UsageError) as error:
        compare(tmp_path / "a", tmp_path / "b")
    assert said in str(error.value)
