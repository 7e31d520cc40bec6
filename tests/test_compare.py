"""Two audits beside each other: what is said to have moved, and what must not be."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch
from commands import run as numdev
from compared_reports import audit, floor, head, times
from gate_rows import case, planned, row
from loaded import load
from oracles import make_case
from test_html import sweep
from torch import Tensor

from numdev import report as reports
from numdev.errors import MeasurementError, NumdevError, UsageError
from numdev.gate.compare import compare, first_difference
from numdev.gate.compare_report import CompareReport, Move
from numdev.gate.noise_model import (
    NoiseModel,
    Pair,
    _log_scatter,
    equality_bound,
    judged_metrics,
    log_standard_error,
    repeat_noise,
)
from numdev.gate.sequence_ratios import SequenceRatios, moved_numbers
from numdev.report import DeviationRow, SweepReport
from numdev.report.document import Figures
from numdev.report.views import document_of
from numdev.request_models import AuditRequest, CaseConfig, Choice
from numdev.studies.audit.run import audit as study
from numdev.testing import check

HEADS = tuple(head(h) for h in range(4))


def compared_rows(
    a: tuple[DeviationRow, ...], b: tuple[DeviationRow, ...]
) -> CompareReport:
    heads = max((1 + (r.head or 0) for r in (*a, *b)), default=1)
    return compare(audit(*a, heads=heads), audit(*b, heads=heads))


def moves(a: DeviationRow, b: DeviationRow) -> tuple[Move, ...]:
    """What moved where one head alone is measured."""
    return compared_rows((a,), (b,)).moves


def first(a: tuple[DeviationRow, ...], b: tuple[DeviationRow, ...]) -> str:
    """The first sentence."""
    return compared_rows(a, b).summary.answer[0]


def test_less_than_five_per_cent_is_nothing() -> None:
    """However well it is known."""
    sure = head(elements=10**12)
    assert not moves(sure, times(sure, 1.049))
    assert moves(sure, times(sure, 1.06))


def test_repeats_are_bounded_by_the_triangle_inequality() -> None:
    """Of errors e and e + d the rms never differ by more than that of d."""
    generator = np.random.default_rng(0)
    for _ in range(200):
        e = generator.normal(size=50)
        d = (
            generator.normal(size=50) * generator.uniform(0, 1)
            + generator.uniform(-1, 1) * e
        )
        one, other, distance = (float(np.sqrt(np.mean(x**2))) for x in (e, e + d, d))
        rows = [head(rms=x, noise=distance) for x in (one, other)]
        assert (
            abs(math.log(other / one))
            <= repeat_noise(Pair(*rows, inputs="same", width=1)) + 1e-12
        )


def test_an_interval_is_1_96_standard_errors_wide() -> None:
    """Both errors known to a factor of 1.2 at 95 %: s = ln(1.2) / 1.96 each."""
    a, b = (
        head(sampled=True, expected_ratio=x, worst_row=None, floor_ratio=None,
             interval={"expected_ratio": (x / 1.2, x * 1.2)}) for x in (1.0, 9.0)
    )  # fmt: skip
    (move,) = moves(a, b)
    z = float(scipy.special.ndtri(1 - 0.005 / 3))
    explained = math.log(1.05) + z * math.sqrt(2) * math.log(1.2) / 1.96
    assert move.noise == pytest.approx(math.exp(explained), rel=1e-6)


def test_noise_in_one_report_counts() -> None:
    """A kernel that is not reproducible now, and was."""
    pair = Pair(head(noise=0.5e-3), head(noise=0.0), inputs="same", width=1)
    assert repeat_noise(pair) == pytest.approx(math.log1p(0.5))


def test_an_error_where_there_was_none() -> None:
    """Moved, and the ratio is null; nothing moved where both are exact."""
    ratios = dict.fromkeys(("row_rel", "floor_ratio", "expected_ratio", "worst_row"), 0.0)
    exact = head(rms=0.0, mean_abs=0.0, max_abs=0.0, **ratios)
    assert not moves(exact, exact)
    for a, b in ((exact, head()), (head(), exact)):
        (move,) = moves(a, b)
        assert move.change is None
        assert move.excess == 100


def test_elements_that_are_not_finite() -> None:
    """None and some are never the same; some and a few more may be."""
    (move,) = moves(head(), head(nonfinite=1))
    assert move.metric == "nonfinite"
    assert move.words == "elements that are not finite: 0, now 1"
    assert moves(head(nonfinite=1), head())
    assert not moves(head(nonfinite=1000), head(nonfinite=1050))
    assert moves(head(nonfinite=1000), head(nonfinite=2000))


def test_reproducibility_is_lost_and_won() -> None:
    """Told of the heads together: one head of eight that differs between runs may be
    luck."""
    same = tuple(head(h) for h in range(8))
    noisy = tuple(head(h, noise=1e-6) for h in range(8))
    for a, b in ((same, noisy), (noisy, same)):
        (move,) = compared_rows(a, b).moves
        assert move.metric == "noise"
    assert (
        "not reproducible (8 of 8 results)" in compared_rows(same, noisy).moves[0].words
    )
    assert not compared_rows(same, (noisy[0], *same[1:])).moves
    assert not compared_rows(noisy, noisy).moves
    alone = tuple(head(h, noise=None) for h in range(8))
    assert not compared_rows(alone, noisy).moves


def test_float64_is_not_judged() -> None:
    """The reference is no more exact than the kernel there."""
    exact = head(format="float64")
    assert not moves(exact, times(exact, 3.0))


def test_options_tell_runs_of_one_kernel_apart() -> None:
    """Where it ran with several sets of them: the first moved, and the last did not."""
    first, last = (head(options={"block": block}) for block in (32, 64))
    result = compared_rows((first, last), (times(first, 2.0), last))
    assert [(g.options["block"], g.moved) for g in result.groups] == [(32, 1), (64, 0)]


def test_a_group_shows_the_median_head_and_the_largest_change() -> None:
    """Of floor ratios 1, 2 and 9; the one that fell to a third changed most."""
    a = tuple(head(h, floor_ratio=x) for h, x in enumerate((1.0, 2.0, 9.0)))
    b = tuple(head(h, floor_ratio=x) for h, x in enumerate((1.0, 4.0, 3.0)))
    (group,) = compared_rows(a, b).groups
    assert (group.metric, group.a, group.b) == ("floor_ratio", 2.0, 3.0)
    assert group.change == pytest.approx(1 / 3)


def on(inputs: float, *rows: DeviationRow) -> tuple[DeviationRow, ...]:
    """Rows with their floors, whose numbers tell of the inputs."""
    bits = struct.pack(">d", inputs).hex()
    floors = (floor(r.head or 0, tensor=r.tensor, rms=inputs, bits=bits) for r in rows)
    return (*rows, *floors)


@pytest.mark.parametrize(
    ("other", "expected_inputs"),
    [(1e-3, "same"), (1e-3 * (1 + 5e-5), "same"), (1.1e-3, "other")],
)
def test_inputs_are_told_by_their_floors(other: float, expected_inputs: str) -> None:
    assert compared_rows(on(1e-3, *HEADS), on(other, *HEADS)).summary.inputs == {
        expected_inputs: 4
    }


def test_an_error_below_half_its_prediction_is_luck_on_other_inputs() -> None:
    pair = Pair(
        head(expected_ratio=0.01), head(expected_ratio=0.5), inputs="other", width=1
    )
    assert equality_bound(pair, "expected_ratio") == 0.5
    a = tuple(head(h, expected_ratio=0.5, worst_row=0.5) for h in range(8))
    b = (head(0, expected_ratio=0.01, worst_row=0.01), *a[1:])
    assert not compared_rows(on(1e-3, *a), on(2e-3, *b)).moves


def test_too_few_heads_to_know_their_scatter() -> None:
    """With other inputs and one head nothing can be judged, and that is counted."""
    a, b = on(1e-3, head()), on(2e-3, times(head(), 3.0))
    (group,) = compared_rows(a, b).groups
    assert (group.unjudged, group.moved) == (1, 0)


def test_the_scatter_of_two_heads_has_one_degree_of_freedom_in_each_report() -> None:
    """Logarithms 0 and 1 have a variance of 1/2, by n - 1; two reports alike give two
    degrees."""
    heads = [head(h, expected_ratio=math.exp(h)) for h in range(2)]
    pairs = [Pair(h, h, inputs="other", width=1) for h in heads]
    assert _log_scatter(pairs, "expected_ratio") == (pytest.approx(0.5), 2)


def test_a_head_that_moved_does_not_excuse_itself() -> None:
    """On other inputs the scatter is that of the other heads: with its own, three times
    is luck."""
    a = tuple(head(h, expected_ratio=1.0 + 0.01 * (h % 3)) for h in range(8))
    b = (times(a[0], 3.0), *a[1:])
    assert {m.place.head for m in compared_rows(on(1e-3, *a), on(2e-3, *b)).moves} == {0}


@pytest.mark.parametrize("tail", ["normal", "uniform", "heavy"])
def test_the_standard_error_is_no_less_than_the_scatter(tail: str) -> None:
    """Of ln rms over many draws, whatever their distribution; and not ten times as
    much."""
    generator = np.random.default_rng(1)
    draws = {
        "normal": generator.normal(size=(2000, 400)),
        "uniform": generator.uniform(-1, 1, size=(2000, 400)),
        "heavy": generator.standard_t(5, size=(2000, 400)),
    }[tail]
    rms = np.sqrt(np.mean(draws**2, axis=1))
    words = [
        log_standard_error(head(elements=400, rms=s, max_abs=m), "rms", s, 1)
        for s, m in zip(rms.tolist(), np.abs(draws).max(axis=1).tolist(), strict=True)
    ]
    scatter = float(np.std(np.log(rms)))
    assert scatter < np.median(words) < 10 * scatter


@pytest.mark.slow
def test_false_alarms_of_errors_drawn_anew() -> None:
    """One at most of 100 comparisons has a move; with one head of 1.5 times the error,
    all."""
    generator = np.random.default_rng(2)

    def drawn(h: int, size: float = 1.0) -> DeviationRow:
        e = generator.normal(size=4096) * 1e-3 * size
        rows = np.sqrt(np.mean(e.reshape(-1, 16) ** 2, axis=1)) / 1e-3
        rms = float(np.sqrt(np.mean(e**2)))
        return head(
            h, elements=4096, rms=rms, max_abs=float(np.abs(e).max()), row_rel=rms,
            floor_ratio=rms / 1e-3, expected_ratio=rms / 1e-3, worst_row=float(rows.max()),
        )  # fmt: skip

    alarms = caught = 0
    for _ in range(100):
        a = tuple(drawn(h) for h in range(64))
        b = tuple(drawn(h) for h in range(64))
        alarms += bool(compared_rows(a, b).moves)
        seen = compared_rows(a, (drawn(0, 1.5), *b[1:])).moves
        caught += any(m.place.head == 0 for m in seen)
    assert alarms <= 1
    assert caught == 100


def test_the_quantile_grows_with_what_is_judged() -> None:
    """Bonferroni: the more numbers, the farther each must be."""
    pairs = [Pair(head(h), head(h), inputs="same", width=1) for h in range(100)]
    assert judged_metrics(pairs[0]) == ("expected_ratio", "floor_ratio", "worst_row")
    few, many = NoiseModel(pairs[:1]), NoiseModel(pairs)
    assert (few.tests, many.tests) == (3, 300)
    assert few.z == pytest.approx(scipy.special.ndtri(1 - 0.005 / 3))
    assert many.z == pytest.approx(scipy.special.ndtri(1 - 0.005 / 300))


def test_rows_that_are_gone_and_why() -> None:
    """Skipped now, failed now, not asked for; by kernel and reason."""
    theirs = tuple(head(h, kernel="theirs") for h in range(4))
    a = (*HEADS, *theirs, *(head(h, kernel="third") for h in range(4)))
    b = (
        row(None, status="skipped", reason="it needs sm_90"),
        row(None, status="failed", reason="illegal access", kernel="theirs"),
    )
    gone = compared_rows(a, b).presences
    assert [(p.what, p.kernel, p.rows, p.why) for p in gone] == [
        ("gone", "mine", 4, "skipped: it needs sm_90"),
        ("gone", "theirs", 4, "failed: illegal access"),
        ("gone", "third", 4, "the kernel is not in the other report"),
        ("failed", "theirs", 1, "in B: illegal access"),
    ]
    assert {p.what for p in compared_rows(b, a).presences} == {"new", "failed"}
    assert " ".join(compared_rows(a, b).summary.answer).startswith(
        "NO NUMBER CHANGED, BUT A KERNEL CRASHED: theirs crashed in B (1 row), mine "
        "was measured "
        "in A alone (4 rows), third was run in A alone (4 rows). Also: nothing was "
        "measured in both "
        "reports."
    )
    assert "CRASHED: theirs crashed in A (1 row), theirs crashed in B (1 row)." in first(
        b, b
    )
    assert "theirs was run in B alone, and crashed in B (1 row)." in first(
        HEADS, (*HEADS, b[1])
    )
    assert first((), ()).startswith("NOT JUDGED: nothing was measured in both reports; ")


def mine(q: Tensor, k: Tensor, v: Tensor, *, off: float = 1.0) -> Tensor:
    """Attention in float32, its third head off by a factor."""
    P = torch.softmax(q.float() @ k.float().mT * q.shape[-1] ** -0.5, dim=-1)
    heads = torch.tensor([1.0, 1.0, off, 1.0])[:, None, None]
    return (P @ v.float() * heads).to(q.dtype)


def run(directory: Path, seed: int = 0, *kernels: Choice) -> Path:
    """A small audit on the CPU, written."""
    chosen = (Choice(name="sdpa-flash"), *kernels)
    cases = (CaseConfig(name="small", batch=2, heads=4, seq_len=48, head_dim=16),)
    request = AuditRequest(
        target="t", cases=cases, kernels=chosen, seed=seed, device="cpu", reproducers=0
    )
    reports.write(study(request, directory), directory)
    return directory


def kernel_off(off: float = 1.0) -> Choice:
    return Choice(name="test_compare:mine", options={"off": off})


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Audits of one request: twice the same, one with a fault in head 2, one of another
    seed."""
    root = tmp_path_factory.mktemp("audits")
    return {
        "a": run(root / "a", 0, kernel_off()),
        "again": run(root / "again", 0, kernel_off()),
        "planted": run(root / "planted", 0, kernel_off(1.03)),
        "seed": run(root / "seed", 1, kernel_off()),
    }


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def command(*arguments: object) -> int:
    return numdev("compare", *arguments)


def test_the_same_audit_twice(audited: dict[str, Path], out: Path) -> None:
    """Exit code 0: the same bits in every row of every kernel, and no change at all."""
    assert command(audited["a"], audited["again"], "-o", out, "--quiet") == 0
    result = reports.read(out)
    words = "NO CHANGE: nothing moved beyond noise; nothing new, nothing gone."
    assert result.summary.answer[0] == words
    assert all(g.same_bits == g.pairs == 4 for g in result.groups)
    assert {g.kernel for g in result.groups} == {
        "baseline",
        "sdpa-flash",
        kernel_off().name,
    }
    assert result.changes == ()
    assert set(result.summary.inputs) == {"same"}


def test_a_kernel_whose_source_is_another_is_named(
    audited: dict[str, Path], tmp_path: Path, out: Path
) -> None:
    """Of a kernel that both reports know; no number moves by it."""
    again = reports.read(audited["again"])
    source = dict(again.provenance.source)
    assert source["kernel_sources"].keys() == {kernel_off().name}
    edited = {"kernel_sources": {kernel_off().name: "0" * 16, "gone:kernel": "1" * 16}}
    provenance = again.provenance.model_copy(update={"source": source | edited})
    reports.write(again.model_copy(update={"provenance": provenance}), tmp_path)
    assert command(audited["a"], tmp_path, "-o", out, "--quiet") == 0
    result = reports.read(out)
    assert f"The source of {kernel_off().name} changed." in result.summary.answer
    (change,) = result.changes
    assert (change.key, change.b) == (f"source of {kernel_off().name}", "0" * 16)


def test_a_planted_change_is_found_in_its_head(
    audited: dict[str, Path], out: Path
) -> None:
    """Exit code 1, that head and no other, and what else changed; the rest is the same
    bits."""
    assert command(audited["a"], audited["planted"], "-o", out, "--quiet") == 1
    result = reports.read(out)
    assert {(m.kernel, m.tensor, m.place.head) for m in result.moves} == {
        (kernel_off().name, "out", 2)
    }
    verdict, more, *others = result.summary.answer
    assert (
        verdict
        == f"CHANGED: {kernel_off().name}[off=1.03] (bfloat16) moved beyond noise."
    )
    assert "in out, small head 2, no mistake named, now the output is 1.030" in more
    assert (
        f"{kernel_off().name}[off=1.03] (bfloat16): moved in out (1 of 4 heads); "
        in " ".join(others)
    )
    grown = next(m for m in result.moves if m.metric in ("expected_ratio", "floor_ratio"))
    assert grown.change > 2
    (change,) = result.changes
    assert (change.key, change.a, change.b) == (
        f"{kernel_off().name}: off",
        "1.0",
        "1.03",
    )
    same = {g.kernel: g.same_bits for g in result.groups if g.tensor == "out"}
    assert same == {"baseline": 4, "sdpa-flash": 4, kernel_off().name: 3}


def test_another_seed_allowed(audited: dict[str, Path], out: Path, capsys: Any) -> None:
    """The same code on other inputs: nothing moved, and that they differ is said on
    top."""
    assert (
        command(audited["a"], audited["seed"], "--allow", "seed", "-o", out, "--json")
        == 0
    )
    assert (out / "report.json").read_text() == capsys.readouterr().out.strip()
    result = reports.read(out)
    assert result.summary.answer[1] == "Compared although they differ: seed (0 and 1)."
    assert set(result.summary.inputs) == {"other"}
    assert any("The inputs differ in" in note for note in result.summary.notes)
    assert not any(g.same_bits for g in result.groups if g.kernel != "baseline")


def written(directory: Path, report: reports.Report) -> Path:
    directory.mkdir(exist_ok=True)
    reports.write(report, directory)
    return directory


def of(
    tmp_path: Path, a: reports.Report, b: reports.Report, **options: Any
) -> CompareReport:
    return compare(written(tmp_path / "a", a), written(tmp_path / "b", b), **options)


def test_of_many_reports_the_last_two_and_a_history(tmp_path: Path) -> None:
    """In the order of the arguments, whatever their clocks say, or where asked by when
    they were made; another request is refused."""

    def night(day: int, ratio: float, **changes: Any) -> reports.AuditReport:
        created = audit(
            *(head(h, floor_ratio=ratio, expected_ratio=ratio) for h in range(4))
        )
        when = created.provenance.model_copy(
            update={"created": f"2026-11-0{day}T03:00:00+00:00"}
        )
        request = {**created.request, **changes}
        return created.model_copy(update={"provenance": when, "request": request})

    nights = night(3, 1.5), night(1, 1.0), night(2, 1.25)
    for sides in (nights, nights[1:]):
        assert [compare(*sides).a.created[8:10], compare(*sides).b.created[8:10]] == [
            "01",
            "02",
        ]
    assert [past.created[8:10] for past in compare(*nights).history] == ["03", "01", "02"]
    result = compare(*nights, by_date=True)
    assert [past.created[8:10] for past in result.history] == ["01", "02", "03"]
    assert [[*past.errors.values()] for past in result.history] == [[1.0], [1.25], [1.5]]
    assert (result.a.created[8:10], result.b.created[8:10], result.exit_code) == (
        "02",
        "03",
        1,
    )
    shown = document_of(result).shown_in("html")
    assert any(isinstance(node, Figures) for node in shown)
    assert not compare(night(1, 1.0), night(2, 1.0)).history
    with pytest.raises(UsageError, match="different things: length"):
        compare(night(1, 1.0, length=77), night(2, 1.0), night(3, 1.0))


OTHER: dict[str, Any] = {
    "checkpoint": "other", "model": "m:f", "text": ["x.txt"], "inputs": "i.safetensors",
    "cases": [{"name": "c"}], "formats": ["float16"], "model_dtype": "bfloat16", "seed": 7,
    "generate": 3, "length": 77, "sequences": 2, "layers": [1], "heads": [0],
    "backward": True, "rows": 64, "seeds": [1], "denoise": 4, "steps": [1],
    "against": "sdpa-math",
}  # fmt: skip


@pytest.mark.parametrize("key", sorted(OTHER))
def test_every_key_that_must_be_the_same(tmp_path: Path, key: str) -> None:
    """Refused by its name, compared where it is allowed, which is said."""
    other = {"formats": {"format": "float16"}, "backward": {"tensor": "dq"}}.get(key, {})
    a, b = audit(head()), audit(head(**other), request={key: OTHER[key]})
    with pytest.raises(UsageError, match=f"different things: {key}.* --allow {key}"):
        of(tmp_path, a, b)
    result = of(tmp_path, a, b, allow=(key,))
    assert [d.root for d in result.allowed] == [key]
    assert any(
        line.startswith(f"Compared although they differ: {key}")
        for line in result.summary.answer
    )


def test_what_is_no_audit(tmp_path: Path) -> None:
    """Another kind of report is refused; what cannot be read is not compared."""
    a = written(tmp_path / "a", audit(head()))
    result = compare(a, a)
    other = written(tmp_path / "other", result)
    with pytest.raises(UsageError, match="a report that can be compared, got compare"):
        compare(a, other)
    with pytest.raises(UsageError, match="cannot read a report there"):
        compare(a, tmp_path / "nothing")
    (tmp_path / "torn.json").write_text('{"kind": "audit"')
    with pytest.raises(MeasurementError, match="not a report this numdev can read"):
        compare(a, tmp_path / "torn.json")
    assert command(a, tmp_path / "torn.json") == 3


@pytest.mark.parametrize(("b", "code"), [
    ((head(),), 0), ((times(head(), 1.02),), 0), ((times(head(), 2.0),), 1),
    ((head(ran="other"),), 1), ((row(None, status="skipped", reason="no"),), 1),
    ((head(), head(kernel="new")), 0),
    ((head(), row(None, kernel="new", status="failed", reason="no")), 3),
    ((times(head(), 2.0), row(None, kernel="new", status="failed", reason="no")), 1),
], ids=["same", "within", "moved", "ran", "gone", "new", "failed", ("moved and failed")])  # fmt: skip
def test_exit_codes(tmp_path: Path, b: tuple[DeviationRow, ...], code: int) -> None:
    """1 for what is certain, whatever failed; 3 where something failed and nothing
    moved."""
    same = head(kernel="same")
    one = written(tmp_path / "a", audit(head(ran="op"), same))
    ran = (
        r.model_copy(update={"ran": r.ran or ("op" if r.status == "ok" else None)})
        for r in b
    )
    two = written(tmp_path / "b", audit(same, *ran))
    assert command(one, two, "-q", "-o", tmp_path / "o") == code


def test_where_it_is_written(tmp_path: Path, out: Path) -> None:
    """Over the same comparison, never over an audit."""
    a = written(tmp_path / "a", audit(head()))
    assert command(a, a, "-q", "-o", out) == 0
    assert command(a, a, "-q", "-o", out) == 0
    assert command(a, a, "-q", "-o", a) == 2


def swept(
    *rows: DeviationRow, seeds: tuple[int, ...] = (0, 1), **request: Any
) -> SweepReport:
    """A sweep by hand: the rows, and no cells."""
    asked = {"cases": [{"name": "c"}], "formats": ["bfloat16"], "seeds": seeds, **request}
    cases = (case(heads=4),) if rows else ()
    update = {"request": asked, "plan": planned(rows), "rows": rows, "cases": cases}
    return sweep(seeds=seeds).model_copy(update=update)


def seeded(seeds: tuple[int, ...] = (0, 1), **changes: Any) -> list[DeviationRow]:
    created = [
        (make, seed, h) for make in (head, floor) for seed in seeds for h in range(4)
    ]
    return [
        make(h, seed=seed, **(changes if make is head else {}))
        for make, seed, h in created
    ]


def in_float16(rows: list[DeviationRow]) -> list[DeviationRow]:
    return [row.model_copy(update={"format": "float16"}) for row in rows]


def test_two_sweeps_are_compared_seed_by_seed(tmp_path: Path, out: Path) -> None:
    """The same one has nothing that moved; a head that is off in one seed is found
    there."""
    rows = seeded()
    bad = [
        times(r, 1.5) if (r.role, r.seed, r.head) == ("kernel", 1, 2) else r for r in rows
    ]
    a, b = (written(tmp_path / name, swept(*x)) for name, x in (("a", rows), ("b", bad)))
    assert compare(a, a).exit_code == 0
    result = compare(a, b)
    assert result.exit_code == 1
    assert {(m.place.seed, m.place.head) for m in result.moves} == {(1, 2)}


@pytest.mark.parametrize(("make", "words"), [
    (lambda: swept(*seeded((0, 2)), seeds=(0, 2)), "seeds ([0, 1] in A, [0, 2] in B)"),
    (lambda: swept(*in_float16(seeded()), formats=["float16"]), "formats"),
    (lambda: swept(*seeded(), cases=[{"name": "c", "seq_len": 9}]), "cases.0.seq_len"),
    (lambda: swept(), "kept one result per cell"),
    (lambda: audit(head()), "kind (sweep in A, audit in B); repeat A's request"),
])  # fmt: skip
def test_sweeps_of_something_else_are_refused(
    tmp_path: Path, make: Any, words: str
) -> None:
    """Other seeds, formats or cases, a sweep without rows, an audit."""
    with pytest.raises(UsageError) as error:
        of(tmp_path, swept(*seeded()), make())
    assert words in str(error.value)


def crashed_row(row: Any) -> Any:
    """The row of a study where its kernel crashed: what says which it is, and no
    number."""
    names = (
        "kind",
        "format",
        "kernel",
        "options",
        "at",
        "site",
        "layer",
        "sequence",
        "role",
    )
    names = (*names, "case", "phase", "axis", "variant", "tensor")
    fields = {
        name: getattr(row, name) for name in names if name in type(row).model_fields
    }
    fields |= {"tensors": ()} if "tensors" in type(row).model_fields else {}
    return type(row)(**fields, status="failed", reason="it crashed")


def without_kernel(report: Any, name: str) -> Any:
    """A report of a study as if the kernel had not been asked for: request, plan and
    rows."""
    more: dict[str, Any] = {
        "kernels": tuple(k for k in report.plan.kernels if k.kernel != name)
    }
    if report.kind == "effects":
        more["runs"] = tuple(run for run in report.plan.runs if run.kernel != name)
        more["sites_of"] = more["kernels"][0].kernel  # of what is left
    tables = {
        table: tuple(r for r in getattr(report, table) if r.kernel != name)
        for table in ("rows", "models")
        if hasattr(report, table)
    }
    kernels = [k for k in report.request["kernels"] if k["name"] != name]
    plan = report.plan.model_copy(update=more)
    request = {**report.request, "kernels": kernels}
    return report.model_copy(update={**tables, "plan": plan, "request": request})


STORED = Path(__file__).parent / "data" / "reports"


@pytest.mark.parametrize("kind", ["effects", "invariance"])
def test_a_study_says_what_one_report_alone_measured(kind: str) -> None:
    """A kernel that is gone is no pass, one that is new is; a report is as it is
    itself."""
    whole = reports.read(STORED / f"{kind}.json")
    kernel = "sdpa-math"
    fewer = without_kernel(whole, kernel)
    gone, new, same = compare(whole, fewer), compare(fewer, whole), compare(whole, whole)
    assert [c.exit_code for c in (gone, new, same)] == [1, 0, 0]
    assert gone.summary.answer[0].startswith(
        "NO NUMBER CHANGED, BUT NOT ALL WAS COMPARED: "
    )
    assert f"{kernel} was run in A alone" in gone.summary.answer[0]
    assert f"{kernel} was run in B alone" in " ".join(new.summary.answer[:2])
    assert (same.presences, same.moves) == ((), ())
    bad = [crashed_row(r) for r in whole.rows[:1]]
    crashed = compare(whole, whole.model_copy(update={"rows": (*bad, *whole.rows[1:])}))
    assert any(p.why == "in B: it crashed" for p in crashed.failed)


@pytest.mark.parametrize("kind", ["effects", "invariance"])
def test_a_row_that_was_planned_and_is_not_there(kind: str) -> None:
    """Makes a report of a study inconsistent, and so does one that was not planned:
    neither is compared, on either side."""
    whole = reports.read(STORED / f"{kind}.json")
    extra = whole.rows[0].model_copy(update={"kernel": "other"})
    for rows in (whole.rows[1:], (*whole.rows, whole.rows[0]), (*whole.rows, extra)):
        bad = whole.model_copy(update={"rows": rows})
        for sides in ((whole, bad), (bad, whole), (bad, bad)):
            with pytest.raises(MeasurementError, match="inconsistent report"):
                compare(*sides)


def test_a_cost_that_was_0_has_moved_where_it_no_longer_is() -> None:
    whole = reports.read(STORED / "effects.json")
    exact = [
        r.model_copy(update={"cost": 0.0}) if r.kind == "repeat" else r
        for r in whole.rows
    ]
    before = whole.model_copy(update={"rows": tuple(exact)})
    for a, b in ((before, whole), (whole, before)):
        assert {move.tensor for move in compare(a, b).moves} == {"repeat"}
    assert not compare(before, before).moves


def test_a_difference_without_a_ratio_has_not_moved_from_itself() -> None:
    whole = reports.read(STORED / "invariance.json")
    nothing: dict[str, Any] = dict.fromkeys(
        ("floor_ratio", "error_base", "error_variant")
    )
    bits = {"differ": 3, "nonfinite": 3, "first": (0, 0, 0, 0), "repeats": True}
    nan = changed(whole, "rows", lambda row: True, **bits, **nothing)
    assert compare(nan, nan).exit_code == 0
    assert compare(whole, nan).exit_code == 1


def test_an_empty_list_beside_nothing_is_a_difference() -> None:
    (difference,) = first_difference("cases", [{"x": []}], [{"x": None}])
    assert (difference.key, difference.a, difference.b) == ("cases.0.x", "[]", "null")


def test_two_checks_know_that_their_inputs_differ() -> None:
    """Calls in memory are in no request; the rows of the floor tell of them."""

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    whole = {"formats": "bfloat16", "backward": False, "claims": {"preset": "fa2"}}
    calls = [
        make_case(q_len=64, kv_len=64, head_dim=64, logits=logits)
        for logits in (1.0, 3.0)
    ]
    a, b = (check(sdpa, cases=[call], **whole).report for call in calls)
    assert set(compare(a, b).summary.inputs) == {"other"}
    assert set(compare(a, a).summary.inputs) == {"same"}


def test_nothing_under_audit_was_compared(tmp_path: Path) -> None:
    """Two reports whose only kernel was skipped have a baseline, which says nothing of
    it."""
    beside = head(role="baseline", kernel="baseline")
    skipped = audit(beside, row(None, status="skipped", reason="needs CUDA"))
    result = compare(skipped, skipped)
    assert (result.exit_code, result.measured) == (3, False)
    words = "NOT JUDGED: no kernel under audit was measured in both reports; "
    assert result.summary.answer[0].startswith(words)
    a = written(tmp_path / "a", skipped)
    assert command(a, a, "-q", "-o", tmp_path / "o") == 3
    assert compare(audit(beside), audit(beside)).exit_code == 0  # no kernel was asked for


LOST = (
    "expected_ratio",
    "floor_ratio",
    "worst_row",
    "noise",
    "nonfinite",
    "baseline_ratio",
)


@pytest.mark.parametrize("name", LOST)
def test_a_number_that_one_report_alone_has(name: str) -> None:
    """Gone from B it is no pass, and named; new in B it is one."""
    bare = head(**{name: None}, nulls={name: "0/0"})
    gone, new = compared_rows((head(),), (bare,)), compared_rows((bare,), (head(),))
    assert [gone.exit_code, new.exit_code] == [1, 0]
    assert f"mine lacks {name} in B (1 row)" in gone.summary.answer[0]
    assert [p.lacks for p in gone.presences] == [(name,)]
    assert [p.what for p in new.presences] == ["new"]


@pytest.mark.parametrize(("name", "value"), [("bits", 16 * "1"), ("ran", "1")])
def test_evidence_that_is_gone(name: str, value: str) -> None:
    assert compared_rows((head(**{name: value}),), (head(),)).exit_code == 1


def test_another_operator_that_one_tensor_alone_names() -> None:
    """The tensors of a pass need not agree: whichever says so is told."""
    a = tuple(head(tensor=tensor, ran="op") for tensor in ("dq", "dk", "dv"))
    for i in range(3):
        b = tuple(r.model_copy(update={"ran": "other"}) if r is a[i] else r for r in a)
        assert [m.metric for m in compared_rows(a, b).moves] == ["ran"]


def test_what_differs_and_cannot_be_judged_is_no_pass(tmp_path: Path) -> None:
    """In float64, and where two heads on other inputs do not know how heads scatter."""
    exact = head(format="float64")
    same, other = (
        compared_rows((exact,), (exact,)),
        compared_rows((exact,), (times(exact, 3.0),)),
    )
    assert (same.exit_code, other.exit_code) == (0, 3)
    assert other.summary.answer[0].startswith("NOT JUDGED: ")
    sides = audit(exact, head()), audit(times(exact, 3.0), head())
    both = compare(*sides)
    assert both.summary.answer[0].startswith(
        "NO NUMBER CHANGED, BUT NOT ALL WAS COMPARED: 1 row "
    )
    a, b = (written(tmp_path / n, x) for n, x in zip("ab", sides, strict=True))
    assert command(a, b, "-q", "-o", tmp_path / "o") == 3


INCONSISTENT: dict[str, dict[str, Any]] = {
    "negative": {"noise": -1e-3}, "huge": {"expected_ratio": 1e301}, "error": {"max_abs": 1e40},
    "probability": {"bias_p": 1.5}, "mean": {"mean_abs": 2e-3},
    "interval without its mean": {"interval": {"rel": (0.1, 0.2)}},
    "numbers of a skipped row": {"status": "skipped"},
}  # fmt: skip


@pytest.mark.parametrize("case", INCONSISTENT)
def test_a_report_that_contradicts_itself(case: str, tmp_path: Path, capsys: Any) -> None:
    """Is compared with nothing, not even with itself: one line, and exit code 3."""
    bad = head().model_copy(update=INCONSISTENT[case])
    a, b = written(tmp_path / "a", audit(head())), written(tmp_path / "b", audit(bad))
    for sides in ((a, b), (b, a), (b, b)):
        assert command(*sides, "-q", "-o", tmp_path / "o") == 3
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{b}: inconsistent report: mine (bfloat16) " in line
    assert compare(audit(head(), head(1)), audit(head(), head(1))).exit_code == 0
    with pytest.raises(MeasurementError, match="inconsistent report: mine"):
        compare(audit(head()), audit(head(), head()))


def test_calls_of_another_shape_or_scale_are_other_calls() -> None:
    a = audit(head())
    for name, value in (("scale", 2.0), ("q_len", 7), ("window", (3, None))):
        cases = (a.cases[0].model_copy(update={name: value}),)
        b = a.model_copy(update={"cases": cases})
        with pytest.raises(UsageError, match=rf"cases\.c\.{name}.* --allow cases"):
            compare(a, b)
        assert compare(a, b, allow=("cases",)).exit_code == 0


def test_hashes_are_compared_to_their_end() -> None:
    sides = (audit(head(), source={"sha256": "0" * 63 + end}) for end in "12")
    with pytest.raises(UsageError, match="different things: checkpoint"):
        compare(*sides)


def changed(report: Any, table: str, which: Any, **update: Any) -> Any:
    """A report of a study with some records of a table changed; a function computes its
    number."""

    def after(record: Any) -> Any:
        if not which(record):
            return record
        values = {
            n: x(getattr(record, n)) if callable(x) else x for n, x in update.items()
        }
        return record.model_copy(update=values)

    return report.model_copy(update={table: tuple(map(after, getattr(report, table)))})


def sequences(count: int) -> Any:
    """The stored report of effects, of so many sequences like its first one: each cost a
    little off, the same in all runs."""
    whole = reports.read(STORED / "effects.json")
    rows = [
        r.model_copy(update={"sequence": i, "cost": r.cost and r.cost * (1 - 0.01 * i)})
        for i in range(count)
        for r in whole.rows
        if r.sequence == 0
    ]
    plan = whole.plan.model_copy(update={"sequences": count})
    request = {**whole.request, "sequences": count}
    read = {f"sequences_{state}": count for state in ("asked", "read")}
    source = {**whole.provenance.source, **read}
    provenance = whole.provenance.model_copy(update={"source": source})
    update = {
        "rows": tuple(rows),
        "plan": plan,
        "request": request,
        "provenance": provenance,
    }
    return whole.model_copy(update=update)


@pytest.mark.parametrize(("count", "factor", "code"), [
    (2, 1.0, 0), (2, 1.5, 3), (2, 0.5, 3), (2, 1000.0, 1), (2, 0.001, 1), (1, 11.0, 1), (1, 9.0, 3),
    (4, 1.0, 0), (4, 1.5, 1), (4, 1000.0, 1),
])  # fmt: skip
def test_costs_of_few_sequences(count: int, factor: float, code: int) -> None:
    """Below three of them chance is unknown: then only a factor above ten is a change."""
    a = sequences(count)
    grow = lambda cost: cost and cost * factor  # noqa: E731
    b = changed(a, "rows", lambda r: True, cost=grow, cost_p999=grow, cost_max=grow)
    result = compare(a, b)
    assert result.exit_code == code, result.summary.answer[0]
    assert any("Chance is unknown" in note for note in result.summary.notes) == (
        code == 3
    )


@pytest.mark.parametrize(("update", "code"), [
    ({"holds": False, "difference": 0.1, "reason": "other"}, 1),
    ({"holds": None, "difference": None, "reason": "takes no mask"}, 1),
    ({"difference": 0.1}, 3), ({"holds": False}, 3), ({"difference": None}, 3),
])  # fmt: skip
def test_checks_of_effects(update: dict[str, Any], code: int) -> None:
    """One that no longer holds, or could no longer be tried, is no pass; nor is one that
    says another thing than its numbers."""
    whole = reports.read(STORED / "effects.json")
    other = changed(whole, "checks", lambda check: check.name == "causality", **update)
    if code == 1:
        result = compare(whole, other)
        assert result.exit_code == 1
        assert "check causality" in result.summary.answer[0]
        assert "other code ran" not in result.summary.answer[0]
    else:
        with pytest.raises(MeasurementError, match="check causality"):
            compare(whole, other)


def test_a_check_that_one_report_alone_planned() -> None:
    """Gone it is no pass, new it is one; one that was planned and is not there is
    inconsistent."""
    whole = reports.read(STORED / "effects.json")
    created, planned_ = (
        tuple(check for check in checks if check.name != "mask")
        for checks in (whole.checks, whole.plan.checks)
    )
    plan = whole.plan.model_copy(update={"checks": planned_})
    fewer = whole.model_copy(update={"checks": created, "plan": plan})
    assert [compare(whole, fewer).exit_code, compare(fewer, whole).exit_code] == [1, 0]
    assert "check mask" in compare(whole, fewer).summary.answer[0]
    with pytest.raises(
        MeasurementError, match="its checks are not those that were planned"
    ):
        compare(whole, whole.model_copy(update={"checks": created}))


LOG_PROBS = dict.fromkeys(("log_prob", "log_prob_p999", "log_prob_max"))


@pytest.mark.parametrize(("kind", "update", "named"), [
    ("whole", LOG_PROBS, "log_prob"), ("whole", {"log_perplexity": None}, "log_perplexity"),
    ("whole", {"from_against": None}, "from_against"), ("site", {"unexplained": None}, "unexplained"),
])  # fmt: skip
def test_numbers_of_effects_that_are_gone(
    kind: str, update: dict[str, Any], named: str
) -> None:
    """What the rows may lack, and A has, is gone, and named; in B alone it is new."""
    whole = reports.read(STORED / "effects.json")
    fewer = changed(whole, "rows", lambda r: r.kind == kind, **update)
    gone, new = compare(whole, fewer), compare(fewer, whole)
    assert [gone.exit_code, new.exit_code] == [1, 0]
    assert {name for p in gone.presences for name in p.lacks} == set(update)
    assert named in gone.summary.answer[0]


@pytest.mark.parametrize(("name", "value"), [
    ("cost", None), ("cost_p999", None), ("log_prob", None), ("flips", None),
    ("unexplained", None), ("error", None), ("growth", ()), ("positions", 99), ("flips", 33),
    ("first_flip", None), ("cost", -1.0), ("error", 1e301),
])  # fmt: skip
def test_numbers_of_effects_that_contradict_each_other(name: str, value: Any) -> None:
    """What every run has, and what cannot be beside its other numbers, is compared with
    nothing."""
    whole = reports.read(STORED / "effects.json")
    other = changed(whole, "rows", lambda r: r.kind == "whole", **{name: value})
    for sides in ((whole, other), (other, whole)):
        with pytest.raises(
            MeasurementError, match="inconsistent report: whole baseline "
        ):
            compare(*sides)


def test_another_number_of_positions_is_a_change() -> None:
    whole = reports.read(STORED / "effects.json")
    result = compare(whole, changed(whole, "rows", lambda row: True, positions=99))
    assert {m.metric for m in result.moves} == {"positions"}
    assert result.moves[0].words == "positions: 64, now 198"


@pytest.mark.parametrize(("flips", "unexplained", "metrics"), [
    (8, 0, set()), (9, 0, {"flips"}), (1, 1, {"unexplained"}),
])  # fmt: skip
def test_chance_flips_near_ties_alone(
    flips: int, unexplained: int, metrics: set[str]
) -> None:
    """Where nothing flipped before, in two sequences: 16 of them may, and 18 not, within
    4 √(their sum); a flip that is no near tie may not."""
    stored = reports.read(STORED / "effects.json")
    none = {"flips": 0, "unexplained": 0, "first_flip": None}
    some = {"flips": flips, "unexplained": unexplained, "first_flip": 3}
    before, now = (
        changed(stored, "rows", lambda r: r.kind == "whole", **x) for x in (none, some)
    )
    assert {m.metric for m in compare(before, now).moves} == metrics


def test_flips_that_are_no_near_ties() -> None:
    whole = reports.read(STORED / "effects.json")
    flips = {"flips": 2, "unexplained": 1, "first_flip": 3}
    other = changed(whole, "rows", lambda r: r.kind == "whole", **flips)
    (move, *_) = [m for m in compare(whole, other).moves if m.metric == "unexplained"]
    assert move.words == "flips that are no near ties: 0, now 2"


@pytest.mark.parametrize(("name", "value"), [
    ("excess", 50.0), ("excess_of_a_row", 50.0), ("nonfinite", 1), ("differ", 2000),
    ("error_base", 50.0), ("elements", 70_000),
])  # fmt: skip
def test_numbers_of_invariance_that_moved(name: str, value: Any) -> None:
    whole = reports.read(STORED / "invariance.json")
    row = next(r for r in whole.rows if 0 < r.differ < 200 and r.tensor == "out")
    result = compare(whole, changed(whole, "rows", lambda r: r is row, **{name: value}))
    assert result.exit_code == 1, result.summary.answer
    assert {m.metric for m in result.moves} == {name}


def test_numbers_of_invariance_that_are_gone() -> None:
    """The three ratios to the floor's error are, together, gone or new; some of them
    alone, or a number that every row has, make a report inconsistent."""
    whole = reports.read(STORED / "invariance.json")
    row = next(r for r in whole.rows if 0 < r.differ < 200 and r.tensor == "out")
    ratios = ("floor_ratio", "error_base", "error_variant")
    fewer = changed(whole, "rows", lambda r: r is row, **dict.fromkeys(ratios))
    gone, new = compare(whole, fewer), compare(fewer, whole)
    assert [gone.exit_code, new.exit_code] == [1, 0]
    assert [p.lacks for p in gone.presences] == [ratios]
    for name in (*ratios, "excess", "difference", "ulps", "first"):
        bad = changed(whole, "rows", lambda r: r is row, **{name: None})
        with pytest.raises(MeasurementError, match="inconsistent report: sdpa-flash"):
            compare(whole, bad)


def test_a_kernel_that_no_longer_repeats_itself() -> None:
    """Its row along `repeat` is told where A gave the same bits again; a report that has
    the row, or says that there is one, without the other is inconsistent."""
    whole = reports.read(STORED / "invariance.json")
    row = next(r for r in whole.rows if 0 < r.differ < 200 and r.tensor == "out")
    variant = f"again, {row.axis} {row.variant}"
    again = {"axis": "repeat", "variant": variant, "cause": None, "tensors": ("out",)}
    extra = row.model_copy(update={**again, "repeats": None})
    says = changed(whole, "rows", lambda r: r is row, repeats=False)
    both = says.model_copy(update={"rows": (*says.rows, extra)})
    result = compare(whole, both)
    assert result.exit_code == 1
    assert [m.tensor for m in result.moves] == ["repeat out"]
    assert result.moves[0].words.startswith(f"{variant}: the same bits, now ")
    for bad in (says, whole.model_copy(update={"rows": (*whole.rows, extra)})):
        with pytest.raises(MeasurementError, match="says something else of its repeats"):
            compare(whole, bad)


NO_CACHE: dict[str, Any] = {
    "reason": "has no cache", "differ": 0, "elements": 0,
    **dict.fromkeys(("difference", "explained", "other_difference", "share")),
}  # fmt: skip


@pytest.mark.parametrize(("update", "words"), [
    ({"difference": 0.5, "other_difference": 0.0, "share": 1.0}, ("CHANGED: sdpa-flash (bfloat16) moved ")),
    ({"differ": 1}, "elements that differ: 11778, now 1"), ({"elements": 9**6}, "elements: 16384"),
    (NO_CACHE, "lacks the model's output along decode in B"),
])  # fmt: skip
def test_the_models_own_output(update: dict[str, Any], words: str) -> None:
    """Where it moved, or could no longer be had, that is no pass."""
    whole = reports.read(STORED / "invariance.json")
    row = next(m for m in whole.models if m.differ > 100)
    result = compare(whole, changed(whole, "models", lambda m: m is row, **update))
    assert result.exit_code == 1
    assert words in " ".join(result.summary.answer[:2])
    assert "other code ran" not in result.summary.answer[0]
    alone = next(
        line for line in result.summary.answer[1:] if line.startswith("sdpa-flash")
    )
    assert ("moved in decode output; " in alone) == bool(result.moves)


@pytest.mark.parametrize("update", [
    {"difference": None}, {"share": 0.5}, {"differ": 0}, {"elements": 0}, {"other_difference": -1.0},
    {"reason": "has no cache"}, {"axis": "padding"}, {"kernel": "other"},
])  # fmt: skip
def test_an_output_of_the_model_that_contradicts_itself(update: dict[str, Any]) -> None:
    """A number it lacks, one that cannot be, numbers of what was not measured, a row that
    was not planned: compared with nothing."""
    whole = reports.read(STORED / "invariance.json")
    row = next(m for m in whole.models if m.differ > 100)
    bad = changed(whole, "models", lambda m: m is row, **update)
    with pytest.raises(
        MeasurementError, match="inconsistent report: the model's output with"
    ):
        compare(whole, bad)


def test_an_output_of_the_model_that_one_report_alone_planned() -> None:
    """Gone it is no pass, new it is one."""
    whole = reports.read(STORED / "invariance.json")
    models = tuple(m for m in whole.models if m.axis != "decode")
    plan = whole.plan.model_copy(update={"models": ("batch",)})
    fewer = whole.model_copy(update={"models": models, "plan": plan})
    gone, new = compare(whole, fewer), compare(fewer, whole)
    assert [gone.exit_code, new.exit_code] == [1, 0]
    assert "lacks the model's output along decode in B" in gone.summary.answer[0]


@pytest.mark.parametrize("make", [
    lambda: audit(head()), lambda: swept(*seeded()),
    lambda: reports.read(STORED / "effects.json"),
    lambda: reports.read(STORED / "invariance.json"),
], ids=["audit", "sweep", "effects", "invariance"])  # fmt: skip
def test_reports_judged_by_other_rules_are_compared(make: Any) -> None:
    """No number depends on the rules: that they differ is listed, and nothing moved."""
    a = make()
    b = a.model_copy(update={"rules": {"name": "strict", "thresholds": []}})
    result = compare(
        a.model_copy(update={"rules": {"name": "mine", "thresholds": []}}), b
    )
    assert (result.exit_code, result.moves, result.allowed) == (0, (), ())
    assert [(d.key, d.a, d.b) for d in result.changes] == [
        ("rules.name", "mine", "strict")
    ]
    assert not compare(a, a).changes
    with pytest.raises(UsageError, match="--allow rules: no such key"):
        compare(a, b, allow=("rules",))


def test_a_zero_is_not_nothing() -> None:
    assert first_difference("seed", 0, None)
    assert first_difference("x", {"y": None}, None)
    assert not first_difference("text", [], None)


load("scripts/fuzz.py")  # which the script imports
altered = load("scripts/altered_comparisons.py")


def code_of(folder: Path, *sides: bytes) -> int:
    """The exit code of two reports, without a page of the comparison."""
    for name, raw in zip("ab", sides, strict=True):
        (folder / f"{name}.json").write_bytes(raw)
    try:
        return compare(folder / "a.json", folder / "b.json").exit_code
    except NumdevError as error:
        return error.exit_code


@pytest.mark.parametrize("kind", list(altered.CLASSES))
def test_an_altered_report_is_no_unchanged_one(kind: str, tmp_path: Path) -> None:
    """Some of scripts/altered_comparisons.py: none ends in exit code 0, and the sound one
    does."""
    sound = reports.read(STORED / f"{kind}.json").model_dump(mode="json")
    raw = altered.sealed(sound)
    assert code_of(tmp_path, raw, raw) == 0
    inputs = [altered.altered(sound, number) for number in range(40)]
    assert len({name for name, *_ in inputs}) > 10
    assert not [name for name, *sides in inputs if code_of(tmp_path, *sides) == 0]


@pytest.mark.parametrize(
    ("both", "moved"),
    [
        ([(1.0, 2.0)] * 3, True),  # no spread at all: p is 0
        ([(1.0, 1.0)] * 3, False),
        ([(1.0, 2.0)] * 2, False),  # too few to know chance, and not far
        ([(1.0, 10.5), (2.0, 21.0)], True),  # beyond SURELY in every sequence
        ([(1.0, 9.9), (2.0, 21.0)], False),
        ([(10.5, 1.0), (1.0, 10.5)], False),  # far, but not in one direction
        ([(10.5, 1.0)], True),
        ([(0.0, 1e-9), (1.0, 1.0)], True),  # 0 in one report alone
        ([(0.0, 0.0)] * 4, False),
        ([(1.0, 1.9), (1.0, 2.0), (1.0, 2.1)], True),  # p = 0.0017
        ([(1.0, 1.1), (1.0, 1.13), (1.0, 1.16)], False),  # p = 0.015: not at 1 %
        ([], False),
    ],
)
def test_a_number_moved_beyond_chance(
    both: list[tuple[float, float]], moved: bool
) -> None:
    """Student's t over sequences, a factor of SURELY, or a 0 that is none any more."""
    assert bool(moved_numbers({"number": SequenceRatios(both=both)})) is moved
