"""`numdev train`: lanes that share nothing, runs that continue, and rows that say what
happened."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from commands import run as numdev
from scipy.stats import wasserstein_distance
from stored import Calls
from test_cli import lines_of, spawn

from numdev.cases import AttentionCase, CaseRef
from numdev.errors import MeasurementError, UsageError
from numdev.formats import FORMATS, round_to
from numdev.gate.findings import WORDS
from numdev.kernels.reference import attend
from numdev.report import Provenance, read
from numdev.report.document import Figures, tables_of
from numdev.studies.audit.journal import JOURNAL
from numdev.studies.training import figures
from numdev.studies.training.answer_sentences import answer_sentences
from numdev.studies.training.config import (
    Optimiser,
    TrainConfig,
    TrainRequest,
    recorded_steps,
    resolve,
)
from numdev.studies.training.initial_attention_error import (
    error_in_floors,
    output_row,
    with_larger_scores,
)
from numdev.studies.training.measure import distance_row, spectral_norms
from numdev.studies.training.networks import build_network
from numdev.studies.training.optimiser import Updates
from numdev.studies.training.report import (
    DistanceRow,
    TrainReport,
    TrainRow,
    TrainSummary,
    VariantRecord,
)
from numdev.studies.training.side_by_side_training import STATE, WORKSPACE, deterministic
from numdev.studies.training.study import train
from numdev.studies.training.token_batches import load_tokens
from numdev.studies.training.variant_training import largest_score, learning_rate
from numdev.yamlfile import read_yaml

GOLDEN = {"name": "golden", "role": "golden", "kernel": "baseline", "format": "bfloat16"}
OTHERS: list[dict[str, Any]] = [
    {"name": "repeat", "role": "null_repeat"},
    {"name": "flash", "role": "flash", "kernel": "sdpa-flash"},
    {"name": "half", "role": "low_precision", "format": "float16"},
    {"name": "pure", "role": "low_precision", "format": "pure bfloat16"},
    {
        "name": "fp32 attention",
        "role": "attention_precision",
        "attention_format": "float32",
    },
    {"name": "other", "role": "other_seed", "seed": 10},
    {"name": "noise", "role": "null_rounding"},
    {"name": "ulp", "role": "null_ulp"},
    {"name": "sgd", "optimiser": {"name": "sgd", "lr": 0.1, "momentum": 0.5}},
]
STATEFUL = [OTHERS[2], OTHERS[6], OTHERS[8]]
"""With a scaler, a generator, and another optimiser."""
SMALL: dict[str, Any] = {
    "model": {"kind": "gpt2", "layers": 2, "width": 16, "heads": 2, "context": 16},
    **{"batch": 2, "steps": 6, "record": [1, 2, 4]},
    "optimiser": {"lr": 0.01, "warmup": 2, "schedule": "cosine", "weight_decay": 0.1},
}


def config(tmp_path: Path, *variants: dict[str, Any], **changes: Any) -> Path:
    """A configuration on disk, whose data is a text file beside it."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    data = {"source": "text", "files": [str(text)]}
    path = tmp_path / "config.yaml"
    content = {**SMALL, "data": data, "variants": [GOLDEN, *variants], **changes}
    path.write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}))
    return path


def request(path: Path, **changes: Any) -> TrainRequest:
    return resolve(
        read_yaml(path, TrainConfig), path.name, **{"device": "cpu", **changes}
    )


def run(
    tmp_path: Path, *variants: dict[str, Any], to: str = "out", **changes: Any
) -> TrainReport:
    return train(request(config(tmp_path, *variants, **changes)), tmp_path / to)


def of(report: TrainReport, name: str) -> list[dict[str, Any]]:
    """All rows of a variant, its distances among them, under one name."""
    rows = [*report.rows, *report.distances]
    return [r.model_dump(exclude={"variant"}) for r in rows if r.variant == name]


def weights_of(report: TrainReport, name: str) -> list[Any]:
    return [d for d in report.distances if (d.variant, d.of) == (name, "weights")]


def test_a_repeat_is_the_golden_run_bit_for_bit(tmp_path: Path) -> None:
    """Its rows are the golden run's, and its distances are zero; those of the others are
    not."""
    report = run(tmp_path, *OTHERS)
    golden, repeat = (
        [r for r in of(report, n) if "loss" in r] for n in ("golden", "repeat")
    )
    assert golden == repeat
    assert {d.equal for d in weights_of(report, "repeat")} == {1.0}
    assert {d.max_abs for d in weights_of(report, "repeat")} == {0.0}
    for other in OTHERS[1:]:
        last = weights_of(report, other["name"])[-1]
        assert last.max_abs > 0, other["name"]


def test_the_order_of_variants_changes_nothing(tmp_path: Path) -> None:
    """Nor who else runs: the same rows in any order, and alone with the golden run."""
    forward = run(tmp_path, *OTHERS, to="a")
    backward = run(tmp_path, *reversed(OTHERS), to="b")
    alone = run(tmp_path, OTHERS[6], {**OTHERS[6], "name": "another"}, to="c")
    for name in [v["name"] for v in (GOLDEN, *OTHERS)]:
        assert of(forward, name) == of(backward, name)
    assert of(alone, "noise") == of(forward, "noise")
    assert weights_of(alone, "noise")[-1].rel != weights_of(alone, "another")[-1].rel


def test_the_gradients_of_another_kernel(tmp_path: Path) -> None:
    """With a kernel behind it that is its own, a variant's run is that kernel's; with
    another one its first loss is its kernel's and its first gradient the other's. The
    report names both."""
    exact = {"name": "emulated", "preset": "exact", "compute": "float32"}
    rough = {**exact, "scores": "e8m3"}
    variants = ({"name": "exact", "kernel": exact}, {"name": "rough", "kernel": rough})
    variants += ({"name": "same", "kernel": rough, "backward_kernel": rough},)
    variants += ({"name": "crossed", "kernel": exact, "backward_kernel": rough},)
    report = run(tmp_path, *variants)
    first = {r.variant: (r.loss, r.grad_norm) for r in report.rows if r.step == 1}
    assert of(report, "same") == of(report, "rough")
    assert first["crossed"][0] == first["exact"][0] != first["rough"][0]
    assert first["crossed"][1] != first["exact"][1]
    differs = {v.name: v.differs for v in report.variants}
    options = {name: value for name, value in rough.items() if name != "name"}
    assert differs["crossed"] == {
        "backward_kernel": {"name": "emulated", "options": options}
    }
    assert differs["rough"] == {}


def test_a_lane_trains_as_a_plain_loop_does(tmp_path: Path) -> None:
    """fp32, written out with torch alone: the same losses and the same norms."""
    report = run(tmp_path, {"name": "x", "role": "low_precision", "format": "float32"})
    asked = request(tmp_path / "config.yaml")
    data = load_tokens(asked.data, asked.model, asked.batch, torch.device("cpu"))
    network = build_network(asked.model, 256, 0)
    decayed = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False)
    result = {}
    for step in range(1, 7):
        batch = data.batch(0, step)
        logits = network(batch["inputs"])
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["targets"].flatten()
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        done = max(0, step - 2) / 4
        lr = 0.01 * (
            step / 2 if step < 3 else 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))
        )
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        adam.zero_grad()
        result[step] = (loss.item(), norm.item(), lr)
    rows = [r for r in report.rows if r.variant == "x" and r.step]
    assert [r.step for r in rows] == [1, 2, 4, 6]
    for r in rows:
        loss, norm, lr = result[r.step]
        # The kernel is the baseline and not SDPA, and the update is fused: fp32 rounding
        # apart.
        assert r.loss == pytest.approx(loss, rel=1e-5)
        assert r.grad_norm == pytest.approx(norm, rel=1e-4)
        assert r.lr == pytest.approx(lr, rel=1e-12)


def test_somebody_elses_loop_has_the_same_batches_and_weights(tmp_path: Path) -> None:
    """Bit for bit, from what docs/training.md says alone."""
    asked = request(config(tmp_path))
    data = load_tokens(asked.data, asked.model, asked.batch, torch.device("cpu"))
    text = torch.frombuffer(
        bytearray((tmp_path / "text.txt").read_bytes()), dtype=torch.uint8
    )
    for seed, step in ((0, 1), (3, 7)):
        words = hashlib.sha256(f"batch/{seed}/{step}".encode()).digest()
        created = torch.Generator().manual_seed(int.from_bytes(words[:7], "big"))
        starts = torch.randint(len(text) - 16, (2, 1), generator=created)
        windows = torch.stack([text[int(s) : int(s) + 17].long() for s in starts])
        batch = data.batch(seed, step)
        assert torch.equal(batch["inputs"], windows[:, :-1])
        assert torch.equal(batch["targets"], windows[:, 1:])
    created = torch.Generator().manual_seed(5)
    for name, parameter in build_network(asked.model, 256, 5).named_parameters():
        expected = torch.ones_like(parameter)
        if parameter.ndim >= 2:
            ends = name.endswith(("attention.out.weight", "mlp.down.weight"))
            spread = 0.02 / math.sqrt(2 * 2) if ends else 0.02
            expected = torch.randn(parameter.shape, generator=created) * spread
        assert torch.equal(parameter, expected), name


def test_a_lane_that_is_lost_goes_on_beside_the_others(tmp_path: Path) -> None:
    """A rate far too high: None, with the reason, and the golden run as if nothing
    were."""
    report = run(
        tmp_path, {"name": "lost", "optimiser": {"lr": 1e30, "warmup": 0}}, to="a"
    )
    rows = {r.step: r for r in report.rows if r.variant == "lost"}
    assert (rows[1].loss is None, rows[6].loss is None) == (False, True)
    assert rows[6].nulls["loss"] == rows[6].nulls["spectral_norm"] == "not finite"
    last = weights_of(report, "lost")[-1]
    assert (last.w1, last.nulls["w1"]) == (None, "not finite")
    assert report.summary.answer[0] == (
        "lost diverged: loss not finite, at step 2; golden stays finite."
    )
    assert of(report, "golden") == of(run(tmp_path, to="b"), "golden")


# --- what is measured -----------------------------------------------------------------


def raises_backward(q: Any, k: Any, v: Any, is_causal: bool, scale: float) -> Any:
    out = q.clone()
    if out.requires_grad:
        out.register_hook(lambda gradient: {}["back"])
    return out


def test_a_kernel_that_raises_anything_is_named(tmp_path: Path) -> None:
    """In backward too: foreign code is not taken for a bug of numdev."""
    with pytest.raises(
        MeasurementError, match=r"variant odd.*KeyError: 'back.*leave the variant"
    ):
        run(tmp_path, {"name": "odd", "kernel": f"{__name__}:raises_backward"})


def test_a_state_that_cannot_be_saved_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    """A full disk is no bug of numdev; torch says it with a RuntimeError of its own."""

    def full(state: Any, path: Path) -> None:
        path.write_bytes(b"some")
        raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        MeasurementError, match=r"state\.pt: the state cannot be saved.*room"
    ):
        run(tmp_path, save_every=1e-6)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {JOURNAL}


def test_distances_are_numpys_and_scipys() -> None:
    created = torch.Generator().manual_seed(0)
    shapes = {
        "tokens.weight": (9, 4),
        "blocks.0.attention.q.weight": (12, 4),
        "final.weight": (4,),
    }
    a, b = (
        {n: torch.randn(s, generator=created) for n, s in shapes.items()} for _ in "ab"
    )
    row = distance_row(a, b, seed=0, variant="v", step=3, of="weights")
    x, y = (
        np.concatenate([t.double().numpy().ravel() for t in w.values()]) for w in (a, b)
    )
    assert row.elements == 88
    assert row.rel == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(y), rel=1e-12)
    assert row.w1 == pytest.approx(wasserstein_distance(x, y), rel=1e-12)


def test_outputs_are_what_numpy_says() -> None:
    """Of two calls laid end to end, in floors: rms error, rms difference from the golden
    run's, bias in ulps and slope beyond the floor's own. A number that is not finite
    leaves none."""
    created = torch.Generator().manual_seed(0)
    truths = [
        torch.randn(2, 3, 5, 4, generator=created, dtype=torch.float64) for _ in "ab"
    ]
    floors = [round_to(x, FORMATS["bfloat16"]).to(torch.bfloat16) for x in truths]
    returned = [(x * 1.02).to(torch.bfloat16) for x in floors]
    row = output_row(returned, floors, truths, 3, "v")
    t, f, o = (
        np.concatenate([x.double().numpy().ravel() for x in w])
        for w in (truths, floors, returned)
    )
    rms = lambda x: math.sqrt(np.mean(np.square(x)))  # noqa: E731
    spacing = np.exp2(np.floor(np.log2(np.abs(t))) - 7)
    assert (row.seed, row.variant, row.calls, row.elements) == (3, "v", 2, 240)
    assert row.floors == pytest.approx(rms(o - t) / rms(f - t), rel=1e-12)
    unit = rms(np.exp2(np.floor(np.log2(np.abs(f))) - 7)) / math.sqrt(12)
    assert row.from_golden == pytest.approx(rms(o - f) / unit, rel=1e-12)
    assert row.bias == pytest.approx(
        np.sum((o - f) * np.sign(t)) / np.sum(spacing), rel=1e-12
    )
    assert row.slope == pytest.approx(np.sum((o - f) * t) / np.sum(t * t), rel=1e-12)
    assert row.slope == pytest.approx(0.02, rel=0.05)
    returned[1][0, 0, 0, 0] = math.nan
    lost = output_row(returned, floors, truths, 3, "v")
    assert (lost.nonfinite, lost.floors, lost.nulls["slope"]) == (1, None, "not finite")


@pytest.mark.parametrize(
    ("golden", "truth", "nulls"),
    [
        (math.nan, 1.0, {"from_golden"}),
        (math.inf, 1.0, {"from_golden"}),
        (1.0, math.nan, {"floors", "bias", "slope"}),
    ],
)
def test_what_a_number_is_made_of_may_not_be_finite(
    golden: float, truth: float, nulls: set[str]
) -> None:
    """The golden run's output, or the exact one: what needs it is null, and says why."""
    out = torch.full((1, 1, 2, 4), 1.02, dtype=torch.bfloat16)
    base, exact = (
        torch.full_like(out, golden),
        torch.full_like(out, truth).double() + 0.001,
    )
    row = output_row([out], [base], [exact], 0, "v")
    assert row.nulls == dict.fromkeys(nulls, "not finite")
    numbers = row.model_dump(include={"floors", "from_golden", "bias", "slope"})
    assert {name for name, x in numbers.items() if x is None} == nulls


def test_what_is_at_the_output_is_recorded(tmp_path: Path) -> None:
    """Of runs whose attention computes something else from the golden run's q, k and v; a
    re-rounding lies as many floors from the golden run's as it claims."""
    more = [{"name": "four", "role": "null_rounding", "times": 4.0}]
    report = run(
        tmp_path,
        *OTHERS,
        *more,
        steps=1,
        record=[1],
        model={**SMALL["model"], "width": 64},
    )
    rows = {row.variant: row for row in report.outputs}
    others = {
        "sgd": 0.0,
        "flash": None,
        "fp32 attention": None,
        "noise": 1.0,
        "four": 4.0,
    }
    assert rows.keys() == {"golden", *others}
    assert rows["golden"].from_golden == 0.0
    assert rows["fp32 attention"].floors == pytest.approx(1.0, rel=0.01)
    for name, distance in others.items():
        if distance is not None:
            assert rows[name].from_golden == pytest.approx(distance, rel=0.25), name
    assert {v.name: v.times for v in report.variants if v.times} == {
        "noise": 1.0,
        "four": 4.0,
    }


def test_spectral_norms_are_the_largest_singular_values() -> None:
    """To fp64's precision, by numpy; NaN in the head that holds one, and in no other."""
    weights = [
        torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(i))
        for i in range(2)
    ]
    weights[1][2, 0, 0] = math.nan
    result = spectral_norms(weights).numpy()
    finite = torch.stack(weights).double().nan_to_num(0.0).numpy()
    truth = np.linalg.svd(finite, compute_uv=False)[..., 0]
    truth[1, 2] = math.nan
    assert result == pytest.approx(truth, rel=1e-13, nan_ok=True)


def test_the_largest_score_is_of_what_a_query_sees() -> None:
    """By numpy, with grouped heads, causal and not: a large score of a hidden pair is in
    one."""
    created = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(2, 4, 5, 8, generator=created),
        torch.randn(2, 2, 5, 8, generator=created),
    )
    k[1, 1, 4] = -30 * q[1, 2, 0]
    scores = np.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(2, dim=1)) * 0.3
    for causal in (True, False):
        case = AttentionCase(
            ref=CaseRef(case="t"), q=q, k=k, v=k, scale=0.3, is_causal=causal
        )
        truth = np.abs(np.tril(scores) if causal else scores).max()
        assert float(largest_score(case)) == pytest.approx(truth, rel=1e-5)


def test_recorded_steps() -> None:
    """The first and the last always; 1, 2, 3, 5 of each decade; multiples; none after the
    end."""
    assert recorded_steps("log", None, 12) == (0, 1, 2, 3, 5, 10, 12)
    assert recorded_steps("log", 50, 120) == (0, 1, 2, 3, 5, 10, 20, 30, 50, 100, 120)
    assert recorded_steps((4, 2, 900), None, 6) == (0, 2, 4, 6)


def test_rates() -> None:
    """Half a cosine from the warm-up's end to `final` at the last step."""
    cosine = Optimiser(lr=2.0, schedule="cosine", warmup=4, final=0.1)
    middle = 2.0 * (0.1 + 0.9 * 0.5)
    assert [learning_rate(cosine, s, 24) for s in (1, 4, 14, 24)] == pytest.approx(
        [0.5, 2.0, middle, 0.2]
    )
    assert (
        learning_rate(Optimiser(lr=2.0), 1, 10)
        == learning_rate(Optimiser(lr=2.0), 10, 10)
        == 2.0
    )


# --- runs that continue ---------------------------------------------------------------


def comparable(report: Any) -> dict[str, Any]:
    plain = report.model_dump(mode="json")
    del plain["timings"], plain["provenance"]["created"], plain["provenance"]["command"]
    return plain


def stops_at(step: int) -> Callable[[str, int, int], None]:
    """A progress callback in which Ctrl-C arrives."""

    def progress(what: str, done: int, total: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    return progress


def cut(asked: TrainRequest, directory: Path, *steps: int) -> Path:
    """Where a run was interrupted at these steps; its state."""
    for step in steps:
        with pytest.raises(KeyboardInterrupt):
            train(asked, directory, progress=stops_at(step))
    return directory / STATE


def ends_as_one_that_was_not_cut(asked: TrainRequest, directory: Path) -> bool:
    """And nothing of the state is left, a save that was killed among it."""
    (directory / f".{STATE}.partly").write_bytes(b"half")
    whole = comparable(train(asked, directory.with_name("whole")))
    same = comparable(train(asked, directory)) == whole
    return same and [path.name for path in directory.iterdir()] == [JOURNAL]


DRAWING: list[dict[str, Any]] = [
    {"name": "emulated", "compute": "float32", "rounding": "stochastic"},
    {"name": "emulated", "compute": "float32", "delta_sign": "random"},
]
DRAWERS = [{"name": f"drawing {i}", "kernel": kernel} for i, kernel in enumerate(DRAWING)]


@pytest.mark.parametrize("kinds", [OTHERS[:5], OTHERS[5:], DRAWERS], ids=str)
def test_an_interrupted_run_ends_with_the_same_report(tmp_path: Path, kinds: Any) -> None:
    """Interrupted again and again, between steps of either seed and after the last; all
    kinds of variants, also recipes that draw."""
    asked = request(config(tmp_path, *kinds, seeds=[0, 1], steps=3, record=[2]))
    cut(asked, tmp_path / "cut", 0, 1, 2, 4, 6)
    assert ends_as_one_that_was_not_cut(asked, tmp_path / "cut")


def test_a_resumed_run_goes_on_from_its_state(tmp_path: Path) -> None:
    """The step after comes first. Another request is refused, and --overwrite begins
    anew."""
    asked, other = request(config(tmp_path)), request(config(tmp_path, steps=7))
    seen: list[int] = []
    cut(asked, tmp_path / "o", 3)
    with pytest.raises(UsageError, match="steps was 6, now 7"):
        train(other, tmp_path / "o")
    train(asked, tmp_path / "o", progress=lambda what, done, total: seen.append(done))
    assert seen == [3, 4, 5, 6]
    train(
        other,
        tmp_path / "o",
        overwrite=True,
        progress=lambda w, done, t: seen.append(done),
    )
    assert seen[4] == 0


def test_a_repeat_draws_what_the_golden_run_drew(tmp_path: Path) -> None:
    """So it is that run bit for bit also where that rounds at random; another seed is
    another."""
    golden = {**GOLDEN, "kernel": DRAWING[0]}
    others = [{"name": "repeat", "role": "null_repeat"}]
    others.append({"name": "another", "kernel": {**DRAWING[0], "seed": 7}})
    report = run(tmp_path, variants=[golden, *others])
    assert weights_of(report, "repeat")[-1].max_abs == 0.0
    assert weights_of(report, "another")[-1].max_abs > 0.0


HARM = {"run": Calls(os.mkdir, "harm")}


@pytest.mark.parametrize("content", [None, [1], HARM], ids=["bytes", "list", "code"])
def test_a_damaged_state_is_no_state(
    tmp_path: Path, content: Any, monkeypatch: Any
) -> None:
    """And one that would run code when unpickled does not."""
    monkeypatch.chdir(tmp_path)
    asked = request(config(tmp_path))
    state = cut(asked, tmp_path / "o", 3)
    torch.save(content, state)
    if content is None:
        state.write_bytes(b"garbage")
    assert ends_as_one_that_was_not_cut(asked, tmp_path / "o")
    assert not Path("harm").exists()


def _without_lanes(state: dict[str, Any]) -> None:
    del state["lanes"]


def _another_step(state: dict[str, Any]) -> None:
    state["step"] -= 1


def _another_weight(state: dict[str, Any]) -> None:
    next(iter(state["lanes"]["golden"]["network"].values())).add_(1e-3)


@pytest.mark.parametrize("edit", [_without_lanes, _another_step, _another_weight])
def test_an_edited_state_is_no_state(tmp_path: Path, edit: Any) -> None:
    """It is not gone on from: the report is that of a run that was not stopped."""
    asked = request(config(tmp_path))
    path = cut(asked, tmp_path / "o", 3)
    state = torch.load(path, weights_only=True)
    edit(state)
    torch.save(state, path)
    assert ends_as_one_that_was_not_cut(asked, tmp_path / "o")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill"]
)
@pytest.mark.thorough
def test_a_process_that_is_stopped_continues(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A process of its own, stopped by a real signal in whatever it is doing: the report
    is that of an undisturbed run. Ctrl-C saves the state and exits with 130."""
    path = config(tmp_path, *STATEFUL, steps=60, save_every=0.02, record=[1, 2, 50])
    to = str(tmp_path / "cut")
    process = spawn("train", str(path), "--device", "cpu", "-q", "-o", to, cwd=tmp_path)
    journal, state = (tmp_path / "cut" / name for name in (JOURNAL, STATE))
    # Step 2
    while process.poll() is None and not (lines_of(journal) >= 1 + 3 and state.exists()):
        time.sleep(0.01)
    process.send_signal(number)
    _, words = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), (
        words
    )
    assert state.exists()
    assert ends_as_one_that_was_not_cut(request(path), tmp_path / "cut")


def test_determinism_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by an exception; settings and environment are as before, a user's own
    workspace kept."""
    monkeypatch.delenv(WORKSPACE, raising=False)

    def settings() -> tuple[Any, ...]:
        fills = torch.utils.deterministic.fill_uninitialized_memory
        return (
            torch.are_deterministic_algorithms_enabled(),
            fills,
            os.environ.get(WORKSPACE),
        )

    before = settings()
    with pytest.raises(ZeroDivisionError), deterministic(wanted=True):  # noqa: PT012
        assert settings() == (True, False, ":4096:8")
        raise ZeroDivisionError
    assert settings() == before
    monkeypatch.setenv(WORKSPACE, ":16:8")
    with deterministic(wanted=True):
        assert os.environ[WORKSPACE] == ":16:8"
    assert os.environ[WORKSPACE] == ":16:8"


def with_golden(*others: dict[str, Any]) -> dict[str, Any]:
    return {"variants": [GOLDEN, *others]}


FILES = {"source": "text", "files": ["{data}"]}


@pytest.mark.parametrize(("changes", "words"), [
    ({"steps": 10**30}, "steps: expected less than or equal to 10000000"),
    ({"stepz": 3}, "unknown key 'stepz'; did you mean 'steps'"),
    ({"model": {**SMALL["model"], "kv_heads": 1}}, "kv_heads: expected with llama alone"),
    ({"model": {**SMALL["model"], "heads": 3}}, ("width: expected a multiple of 6, got 16")),
    ({"data": {"source": "text"}}, "files: expected with"),
    ({"data": {**FILES, "tokenizer": "bpe", "vocabulary": 257}}, "or equal to 258"),
    ({"data": {**FILES, "vocabulary": 300}}, "vocabulary: expected with"),
    ({"variants": [{"name": "a"}]}, "one with the role golden, got 0"),
    (with_golden({"name": "a b"}, {"name": "a-b"}), ("expected distinct names, got 'a-b' 2 times")),
    (with_golden({"name": "x", "role": "flash"}), ("x, flash: expected kernel, got nothing")),
    (with_golden({**OTHERS[0], "seed": 1}), "null_repeat: expected nothing, got seed"),
    (with_golden({**OTHERS[0], "times": 2}), ("times: expected with null_rounding, got null_repeat")),
    (with_golden({**OTHERS[6], "times": 65}), ("times: expected less than or equal to 64")),
    ({"variants": [{**GOLDEN, "seed": 1}]}, "golden: expected kernel (and"),
    ({"checkpoints": {"steps": [1], "variants": ["gold"]}}, "did you mean 'golden'"),
    ({"checkpoints": {"steps": [7]}}, "expected at most step 6, got 7"),
    ({"data": FILES}, "data: expected text in UTF-8"),
    (with_golden({"name": "x", "kernel": "sdpa-efficient"}), "cannot run here"),
    (with_golden({"name": "x", "kernel": {"name": "emulated", "computed": 1}}), "'compute'"),
    (with_golden({"name": "x", "kernel": "sdpa-flsh"}), "did you mean 'sdpa-flash'"),
], ids=lambda x: str(x)[:30])  # fmt: skip
def test_what_is_wrong_is_said(tmp_path: Path, changes: Any, words: str) -> None:
    """Before anything is begun. The file of the data is no UTF-8."""
    (tmp_path / "data").write_bytes(b"\xff" * 6)
    if "files" in changes.get("data", {}):
        changes = {"data": {**changes["data"], "files": [str(tmp_path / "data")]}}
    with pytest.raises(UsageError) as error:
        run(tmp_path, **changes)
    assert words in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_run_in_parts_ends_with_the_same_report(tmp_path: Path, capsys: Any) -> None:
    """--stop-after exits with 0, says how to go on, and writes no report; --steps and
    --seed hold; with --json stdout is the report and nothing else."""
    path, output = config(tmp_path, OTHERS[6], seeds=[0, 1]), tmp_path / "o"
    more = ("--steps", 2, "--seed", 5, "--device", "cpu")
    parts = 0
    while not (output / "report.json").exists():
        assert numdev("train", path, "-o", output, "--stop-after", 0.001, *more) == 0
        words = capsys.readouterr().err
        assert ("continue with the same command" in words) != (
            output / "report.json"
        ).exists()
        parts += 1
    assert parts == 3  # a seed that is finished ends no part
    assert numdev("train", path, "-o", tmp_path / "p", "--json", *more) == 0
    whole = read(tmp_path / "p")
    assert (tmp_path / "p" / "report.json").read_text() == capsys.readouterr().out.strip()
    assert (whole.summary.steps, whole.summary.seeds) == (2, (5, 6))
    assert comparable(read(output)) == comparable(whole)


def test_checkpoints_are_written_as_they_were_at_their_step(tmp_path: Path) -> None:
    """Of the variants asked for; an audit takes them; --overwrite removes them."""
    path = config(tmp_path, OTHERS[1], checkpoints={"steps": [3], "variants": ["flash"]})
    output = tmp_path / "o"
    assert numdev("train", path, "-o", output, "-q", "--device", "cpu") == 0
    (saved,) = (output / "checkpoints").iterdir()
    assert saved.name == "flash-seed0-step3"
    assert json.loads((saved / "training.json").read_text())["step"] == 3
    assert numdev("audit", saved, "-o", tmp_path / "a", "-q", "--length", 16) == 0
    assert read(tmp_path / "a").measured
    other = config(tmp_path, OTHERS[1], checkpoints={"steps": ["last"]})
    assert (
        numdev("train", other, "-o", output, "-q", "--overwrite", "--device", "cpu") == 0
    )
    names = {path.name for path in (output / "checkpoints").iterdir()}
    assert names == {"golden-seed0-step6", "flash-seed0-step6"}


@pytest.mark.parametrize(("off", "least", "most"), [(1.0, 0.9, 1.3), (1.02, 5.0, 20.0)])
def test_sharpened_calls_tell_a_wrong_scale(
    off: float, least: float, most: float
) -> None:
    """Scores that are near zero hide it; q times a power of two, until scores reach 8,
    shows it."""
    created = torch.Generator().manual_seed(0)
    q, k, v = (0.1 * torch.randn(2, 2, 64, 32, generator=created) for _ in "qkv")
    case = AttentionCase(
        ref=CaseRef(case="t"), q=q.bfloat16(), k=k.bfloat16(), v=v.bfloat16(), scale=32**-0.5,
        is_causal=True,
    )  # fmt: skip
    sharp = with_larger_scores(case)
    assert 8.0 <= float(largest_score(sharp)) < 16.0
    assert torch.equal(
        sharp.q / case.q,
        torch.full_like(q, float(sharp.q[0, 0, 0, 0] / case.q[0, 0, 0, 0])),
    )

    def errs(case: AttentionCase) -> float:
        out = torch.nn.functional.scaled_dot_product_attention(
            case.q, case.k, case.v, is_causal=True, scale=case.scale * off
        )
        return error_in_floors([out], [attend(case).out])

    assert errs(case) < 1.3
    assert least < errs(sharp) < most


# --- the first sentences --------------------------------------------------------------


ROLES: dict[str, Any] = {
    "golden": {"role": "golden"}, "flash": {"role": "flash"},
    "one": {"role": "null_rounding", "times": 1.0},
    "two": {"role": "null_rounding", "times": 1.0},
    "sixteen": {"role": "null_rounding", "times": 16.0},
}  # fmt: skip


def early_sentence(
    distances: dict[str, dict[int, list[Any]]],
    losses: dict[str, list[list[Any]]] | None = None,
) -> tuple[str, ...]:
    """The answer of a run: of variants the mean distances by step, one for each seed; and
    losses by seed, of steps 1, 2, and so on."""
    how: Any = {"kernel": "k", "format": "bfloat16", "attention_format": "bfloat16"}
    place: Any = {"of": "weights", "elements": 9, "w1": 0.0}
    rows: Any = {"grad_norm": 1.0, "lr": 1.0, "max_logit": 1.0, "spectral_norm": 1.0}
    report = TrainReport(
        provenance=Provenance(numdev="0", command="", created="", system={}, source={}),
        request={},
        summary=TrainSummary(
            answer=(), steps=9, seeds=(0,), parameters=1, model="gpt2", data="d"
        ),
        variants=tuple(VariantRecord(name=name, **how, **role) for name, role in ROLES.items()),
        rows=tuple(
            TrainRow(seed=seed, variant=name, step=step, loss=loss, **rows)
            for name, seeds in (losses or {}).items()
            for seed, steps in enumerate(seeds)
            for step, loss in enumerate(steps, 1)
        ),
        distances=tuple(
            DistanceRow(
                variant=name, seed=seed, step=step, equal=None if x is None else float(x == 0),
                **dict.fromkeys(("mean_abs", "max_abs", "rel"), x), **place,
            )
            for name, steps in distances.items()
            for step, values in steps.items()
            for seed, x in enumerate(values)
        ),
    )  # fmt: skip
    return tuple(answer_sentences(report))


def test_a_run_opens_with_early_ratios_paired_by_seed() -> None:
    """Of the steps before two doses lie together, seed by seed, with their range; not of
    the last step, at which here everything is as far as everything."""
    one = {1: [1.0, 2.0, 4.0], 2: [2.0, 4.0, 8.0], 9: [50.0, 50.0, 50.0]}
    flash = {1: [1.1, 2.0, 3.6], 2: [2.2, 4.0, 7.2], 9: [50.0, 50.0, 50.0]}
    sixteen = {
        step: [(3 if step < 9 else 1) * x for x in values] for step, values in one.items()
    }
    words = early_sentence({"flash": flash, "one": one, "two": one, "sixteen": sixteen})
    mean = (1.1 * 1.0 * 0.9) ** (1 / 3)
    assert words[0] == (
        f"flash: its weights are {mean:.2f} times (0.90 to 1.10, 3 seeds) as far "
        "from the golden "
        "run's as re-rounding attention at one floor, at steps 1 to 2."
    )
    assert words[1].startswith(
        "null: re-rounded at 16: its weights are 3.00 times (3.00 to 3.00, "
    )
    assert len(words) == 2


def test_runs_that_equal_the_golden_come_in_the_order_of_variants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["q", "a", "z", "c", "m", "b", "k", "d"]
    for name in names:
        monkeypatch.setitem(ROLES, name, {"role": "variant"})
    words = early_sentence({name: {1: [0.0]} for name in names})
    assert [sentence.partition(":")[0] for sentence in words] == names


def test_without_a_null_a_run_says_the_first_step_alone() -> None:
    assert early_sentence({"flash": {1: [0.02, 0.04], 9: [0.5, 0.5]}}) == (
        "flash: its weights are 0.028 (0.02 to 0.04, 2 seeds) of their size off the "
        "golden run's "
        "at step 1; with no re-rounding beside it nothing is said of later ones.",
    )


def test_what_is_lost_comes_first() -> None:
    """Most seeds first, with the first step; the table says of how many seeds a mean
    is."""
    fine = [[2.0, 2.0, 2.0]] * 3
    lost = [[2.0, None, None], [2.0, 2.0, None], [3.862] * 3]
    losses = {"golden": fine, "one": [[2.0, None, None], *fine[:2]], "flash": lost}
    words = early_sentence(
        {"flash": {1: [1.0, 1.0, 1.0]}, "one": {1: [1.0, 1.0, 1.0]}}, losses
    )
    assert words[:3] == (
        "flash and one diverged: loss not finite, flash at step 2 in 2 of 3 seeds; golden, "
        "two and sixteen stay finite.",
        (
            "NOT FINITE: flash: its loss is not finite in 2 of 3 seeds, first at step 2 "
            "of seed 0."
        ),
        (
            "NOT FINITE: one: its loss is not finite in 1 of 3 seeds, first at step 2 "
            "of seed 0."
        ),
    )
    values = [("flash", 3, loss) for loss in (None, None, 3.862)]
    drawn = figures.figure_by_step(
        "Loss", "loss", "loss", ["flash"], values, lambda x: (x[0], None, None)
    )
    axis = figures.step_axis([1, 3])
    [table] = tables_of(Figures((drawn,), axis))
    assert [cell.text for cell in table.rows[0].cells] == ["flash", "–", "3.862 (1 of 3)"]


def test_a_run_begins_with_its_conclusion() -> None:
    """Whether a run diverged, else how the kernel under test is beside re-rounding; a
    line, whose colour says whether it is bad."""
    fine = {"golden": [[2.0, 2.0]], "flash": [[2.0, 2.0]]}
    one, flash = {1: [1.0], 2: [2.0], 9: [50.0]}, {1: [1.1], 2: [2.2], 9: [50.0]}
    sixteen = {1: [3.0], 2: [6.0], 9: [50.0]}
    nulls = {"one": one, "two": one, "sixteen": sixteen}
    cases = {
        "No run diverged in 9 steps; flash is 1.10× as far from the golden run as "
        "re-rounding.": early_sentence({"flash": flash, **nulls}, fine),
        "No run diverged in 9 steps; flash has the golden run's weights, bit for bit.": early_sentence(
            {"flash": {1: [0.0]}}, fine
        ),
        "No run diverged in 9 steps; whether flash does more than chance is open: no run "
        "is re-rounded.": early_sentence({"flash": flash}, fine),
        "golden and flash diverged: loss not finite, golden at step 1; one, two and "
        "sixteen stay finite.": early_sentence(
            {}, {name: [[None, None]] for name in fine}
        ),
    }
    for sentence, answer in cases.items():
        assert (answer[0], len(sentence.split()) <= WORDS) == (sentence, True)


def test_weights_that_are_no_longer_finite_are_not_said_to_be_the_same() -> None:
    same = early_sentence({"flash": {1: [0.0], 2: [0.0]}})
    assert same == (
        "flash: its weights are the golden run's, bit for bit, at every recorded step.",
    )
    gone = early_sentence({"flash": {1: [0.0], 2: [None]}})
    assert not any("bit for bit" in sentence for sentence in gone)


@pytest.mark.parametrize(("settings", "theirs"), [
    ({"name": "adamw", "weight_decay": 0.1}, "AdamW"), ({"name": "sgd"}, "SGD"),
    ({"name": "sgd", "momentum": 0.5, "weight_decay": 0.1}, "SGD"),
])  # fmt: skip
@pytest.mark.parametrize("scaled", [False, True])
def test_updates_are_torchs_bit_for_bit(settings: Any, theirs: str, scaled: bool) -> None:
    """As torch.optim's fused classes make them, over five steps of another rate each,
    with a parameter that has no gradient at first, and with a scaler, which skips a step
    of infinities."""
    created = Optimiser(**settings)
    shapes = [(4, 3), (3,), (2, 5)]
    ours, others = (
        [torch.nn.Parameter(normal(*shape, seed=i)) for i, shape in enumerate(shapes)]
        for _ in range(2)
    )
    more = {"momentum": created.momentum} if theirs == "SGD" else {"betas": created.betas}
    groups = [
        {"params": [others[0], others[2]], "weight_decay": created.weight_decay},
        {"params": [others[1]], "weight_decay": 0.0},
    ]
    updates: Any = Updates(created, ours)
    reference = getattr(torch.optim, theirs)(groups, lr=created.lr, fused=True, **more)
    scalers = [
        torch.amp.GradScaler("cpu", enabled=scaled, init_scale=4.0) for _ in range(2)
    ]
    for step in range(5):
        updates.set_rate(0.01 * (step + 1))
        for group in reference.param_groups:
            group["lr"] = 0.01 * (step + 1)
        for i, (a, b) in enumerate(zip(ours, others, strict=True)):
            if step or i or theirs == "SGD":  # which refuses that, with momentum, itself
                a.grad = normal(*a.shape, seed=10 * step + i) * (
                    math.inf if step == 2 else 1.0
                )
                b.grad = a.grad.clone()
        for optimiser, scaler in ((updates, scalers[0]), (reference, scalers[1])):
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimiser)
            scaler.step(optimiser)
            scaler.update()
            optimiser.zero_grad()
        same = [
            torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
            for a, b in zip(ours, others, strict=True)
        ]
        assert same == [True] * 3, step
    assert scaled == all(bool(p.isfinite().all()) for p in ours)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_state_of_updates_goes_on_where_it_was() -> None:
    """What was saved and loaded by another makes the same next step; an empty state is a
    start."""
    first, second = ([torch.nn.Parameter(normal(3, 2, seed=1))] for _ in range(2))
    created = Optimiser()
    one, other = Updates(created, first), Updates(created, second)
    other.load_state(one.state())
    for updates, parameters in ((one, first), (other, second)):
        parameters[0].grad = normal(3, 2, seed=2)
        updates.step()
    assert torch.equal(first[0], second[0])
    third = [torch.nn.Parameter(first[0].detach().clone())]
    resumed = Updates(created, third)
    resumed.load_state(
        [{name: x.clone() for name, x in slots.items()} for slots in one.state()]
    )
    for updates, parameters in ((one, first), (resumed, third)):
        parameters[0].grad = normal(3, 2, seed=3)
        updates.step()
    assert torch.equal(first[0], third[0])
    assert resumed.state()[0]["step"] == 2


@pytest.mark.slow
def test_training_imports_no_compiler(tmp_path: Path) -> None:
    """Dynamo and Inductor cost three seconds of CPU, and compile nothing here."""
    small = config(tmp_path)
    code = (
        "import sys\n"
        "from numdev.cli.main import cli\n"
        f"sys.argv = ['numdev', 'train', {str(small)!r}, '-o', "
        f"{str(tmp_path / 'o')!r}, '-q']\n"
        "try:\n    cli()\nfinally:\n"
        "    names = ('torch._dynamo', 'torch._inductor', 'torch')\n"
        "    print([name for name in names if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "['torch']"


def test_what_compiles_is_told_to_be_deterministic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor by its variable where nothing has imported it, and by its setting where
    something has; all as before afterwards."""
    settings = SimpleNamespace(deterministic=False)
    monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", "0")
    monkeypatch.setitem(sys.modules, "torch._inductor.config", settings)
    with deterministic(wanted=True):
        assert os.environ["TORCHINDUCTOR_DETERMINISTIC"] == "1"
        assert settings.deterministic
        assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["TORCHINDUCTOR_DETERMINISTIC"] == "0"
    assert not settings.deterministic
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(wanted=False):
        assert not settings.deterministic
