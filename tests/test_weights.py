"""`numdev weights` as a user meets it: what is compared, what is said, and the exit codes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ran
from stored import sharded
from torch import Tensor

from numdev import report
from numdev.training.weights.report import WeightsReport
from numdev.training.weights.study import weights

State = dict[str, Tensor]
NAMES = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def state(seed: int = 0, **more: Tensor) -> State:
    """A little model: an embedding, a layer, a norm of ones."""
    generator = torch.Generator().manual_seed(seed)
    return {
        EMBEDDING: 0.02 * torch.randn(32, 8, generator=generator),
        NAMES[0]: 0.1 * torch.randn(8, 8, generator=generator),
        NAMES[1]: 0.1 * torch.randn(16, 8, generator=generator),
        "model.norm.weight": torch.ones(8),
        **more,
    }


Compare = Callable[..., WeightsReport]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Save states as a.pt, b.pt, ... (what is given as bytes is written as it is), and compare."""
    monkeypatch.chdir(tmp_path)

    def run(*states: State | bytes) -> WeightsReport:
        names = [f"{letter}.pt" for letter in "abcdefg"[: len(states)]]
        for name, tensors in zip(names, states, strict=True):
            if isinstance(tensors, bytes):
                Path(name).write_bytes(tensors)
            else:
                torch.save(tensors, name)
        return weights(names, tmp_path / "out", device="cpu", overwrite=True)

    return run


def said(found: WeightsReport) -> str:
    return "\n".join(found.summary.answer)


def matters(found: WeightsReport, what: str) -> list[tuple[str, str | None]]:
    return [(r.source, r.tensor) for r in found.remarks if r.what == what]


# --- what is compared ----------------------------------------------------------------------------


def test_equal_weights_are_said_to_be_equal(compare: Compare) -> None:
    """Every element equal: one sentence, and no remark."""
    found = compare(state(), state())
    assert found.summary.answer == (
        "b.pt equals a.pt: every finite element of the 4 tensors compared (456).",
    )
    assert found.remarks == ()
    assert found.totals[0].identical == 4


def test_weights_in_bfloat16_are_set_beside_a_coarser_cast(compare: Compare) -> None:
    """Where the first is stored in bfloat16 a cast to it changes nothing; the yardstick is the
    first coarser format. Where there is none, that is said."""
    first = {k: x.bfloat16() for k, x in state().items()}
    assert compare(first, state(1)).totals[0].yardstick == "float8_e4m3fn"
    found = compare({k: x.to(torch.float8_e4m3fn) for k, x in state().items()}, state(1))
    assert found.totals[0].yardstick is None
    assert "is coarser than how a.pt is stored" in said(found)


# --- what cannot be ------------------------------------------------------------------------------


def test_missing_extra_and_reshaped_tensors_are_named(compare: Compare) -> None:
    """By the set they are the matter of; the rest is compared."""
    other = state(1, more=torch.zeros(2)) | {NAMES[0]: torch.zeros(4, 16)}
    del other["model.norm.weight"]
    found = compare(state(), other)
    assert matters(found, "missing") == [("b.pt", "model.norm.weight")]
    assert matters(found, "extra") == [("b.pt", "more")]
    assert matters(found, "reshaped") == [("b.pt", NAMES[0])]
    assert "is [4, 16], and [8, 8] in a.pt" in said(found)
    assert len(found.rows) == 2
    assert found.damage == ()


def test_nan_weights_are_counted_and_the_rest_is_compared(compare: Compare) -> None:
    """NaN in one tensor spoils no number, is no equality, and is said."""
    other = state()
    other[NAMES[1]][3, :2] = float("nan")
    found = compare(state(), other)
    assert "has 2 NaN or infinite elements of 128" in said(found)
    assert found.totals[0].identical == 3
    assert all(row.mean_abs == 0 for row in found.rows)


def test_what_a_pickle_holds_that_is_no_array_is_named(compare: Compare) -> None:
    """Sparse, nested, without values, complex; and a shape that the stored bytes are not enough
    for, which would take forever to compare. The rest is compared, and nothing is a bug."""
    odd = {
        "sparse": torch.eye(2).to_sparse(),
        "empty": torch.empty(3, device="meta"),
        "complex": torch.ones(2, dtype=torch.complex64),
        "vast": torch.zeros(1).expand(10**6, 10**6),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }
    found = compare(state(0, **odd), state(1, **odd))
    assert {row.tensor for row in found.rows} == {*state()}
    named = {r.tensor: r.words for r in found.remarks if r.what == "not compared"}
    assert named.keys() == odd.keys()
    assert named["vast"] == "has 1000000000000 elements of which only 1 are stored"


def test_a_difference_beyond_float64_is_not_zero(compare: Compare) -> None:
    """Two ends of float64's range are not said to be equal, nor to hold no element."""
    ends = [{"w": torch.full((4,), sign * 1.7e308, dtype=torch.float64)} for sign in (1.0, -1.0)]
    found = compare(*ends)
    [row] = found.rows
    assert (row.max_abs, row.mean_abs, row.equal) == (None, None, 0.0)
    assert row.nulls["mean_abs"] == "is beyond what float64 holds"
    assert "not known (is beyond what float64 holds)" in said(found)


def test_a_tied_head(compare: Compare) -> None:
    """A pickle that shares storage has it under both names; a set that leaves it out lacks it."""
    tied = {HEAD: state(1)[EMBEDDING], **state(1)}
    tied[EMBEDDING] = tied[HEAD]
    for found in (compare(state(), tied), compare(tied, state())):
        assert len(found.rows) == 4
        assert matters(found, "missing") == matters(found, "extra") == []
    found = compare(state(), state(**{HEAD: state()[EMBEDDING] + 0.5}))
    assert matters(found, "extra") == [("b.pt", HEAD)]


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """`numdev weights ARGUMENTS -o out` in a directory with a.pt, b.pt and c.pt: exit code, stdout,
    stderr."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("a.pt", "b.pt", "c.pt")):
        torch.save(state(seed), name)

    return lambda *arguments: ran(capsys, "weights", *arguments, "-o", "out")


def test_damage_is_exit_code_3_after_the_report(run: Any, tmp_path: Path) -> None:
    """A truncated shard: the rest is compared and reported, one line says what is damaged, and no
    tensor of it is called missing."""
    for name, seed in (("x", 0), ("y", 1)):
        sharded(tmp_path / name, state(seed))
    path = tmp_path / "y" / "model-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 4)
    code, out, err = run("x", "y")
    assert code == 3
    assert "differs from" in out
    assert f"{path.name}: is not a whole safetensors file" in err.splitlines()[-1]
    found = report.read(Path("out"))
    assert isinstance(found, WeightsReport)
    assert len(found.rows) == 2
    assert [r.what for r in found.remarks] == ["damaged"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("a.pt",), 2, "nothing to compare it with"),
        (("a.pt", "nowhere.pt"), 2, "no such file or directory"),
        (("a.pt", "b.pt", "b.pt"), 2, "given twice"),
        (("a.pt", "broken.pt"), 3, "broken.pt: is damaged or holds Python objects"),
        (("a.pt", "others.pt"), 3, "no tensor could be compared: others.pt: model.embed_tokens"),
    ],
)
def test_errors_are_one_line(run: Any, arguments: Any, code: int, words: str) -> None:
    """And nothing else: no report is left where nothing was compared."""
    torch.save({"x": torch.ones(2)}, "others.pt")
    Path("broken.pt").write_bytes(b"nothing")
    found, out, err = run(*arguments)
    assert (found, out) == (code, "")
    assert err.count("\n") == 1
    assert words in err
    assert not Path("out/report.json").exists()


def test_another_request_is_refused(run: Any) -> None:
    """The same one replaces its report; another needs --overwrite."""
    assert run("a.pt", "b.pt")[0] == run("a.pt", "b.pt")[0] == 0
    code, _, err = run("a.pt", "c.pt")
    assert code == 2
    assert "holds the report of another numdev weights" in err
    assert run("a.pt", "c.pt", "--overwrite")[0] == 0


@pytest.mark.gpu
def test_on_a_gpu_the_numbers_are_the_same(run: Any, tmp_path: Path) -> None:
    """CPU and GPU add up in other orders (n u of 256 terms) and agree in all else."""
    here, there = (weights(["a.pt", "b.pt"], tmp_path / d, device=d) for d in ("cpu", "cuda"))
    for one, other in zip(here.rows, there.rows, strict=True):
        for name, value in one.model_dump().items():
            wanted = pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
            assert getattr(other, name) == wanted, (one.tensor, name)
