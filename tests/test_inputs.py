"""Drawn inputs: a seed means the same numbers, and each regime has the property it stands
for, after rounding too, by plain arithmetic in fp64."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef, additive, visible
from numdev.errors import UsageError
from numdev.formats import format_named, round_to
from numdev.kernels.reference import attend
from numdev.request_models import CaseConfig, Layout, MaskKind, SweepConfig
from numdev.sources.case_sources import ConfigSource
from numdev.sources.input_regimes import (
    REGIMES,
    Draws,
    Inputs,
    Shapes,
    checked_regime,
    draw,
    draw_mask,
)
from numdev.system import System
from numdev.yamlfile import bundled_path, read_yaml

ROOT = Path(__file__).parent.parent
SHAPES = Shapes(batch=2, heads=4, kv_heads=2, q_len=48, kv_len=256, head_dim=64, v_dim=32)
HALVES = ("bfloat16", "float16")
MASKS: tuple[str, ...] = get_args(MaskKind)


def drawn(
    name: str, shapes: Shapes = SHAPES, seed: int = 0, label: str = "", **of: Any
) -> Inputs:
    return draw(name, shapes, seed=seed, options=of, label=label, gradients=True)


def case_of(inputs: Inputs, fmt: str = "float64") -> AttentionCase:
    q, k, v = inputs
    case = AttentionCase(ref=CaseRef(case="c"), q=q, k=k, v=v, scale=q.shape[-1] ** -0.5)
    return case.rounded_to(format_named(fmt))


def source_of(configs: Any) -> ConfigSource:
    return ConfigSource("t", configs, (0,), System.probe("cpu"), gradients=True)


@pytest.mark.parametrize("name", REGIMES)
def test_every_regime(name: str) -> None:
    """Shapes and format; another seed or label draws something else; q, k and v are the
    same with dO and without; neither the rounded inputs nor the exact output overflow."""
    x = drawn(name, seed=7, label="a")
    shapes = [tuple(t.shape) for t in (*x, x.grad_out)]
    assert shapes == [(2, 4, 48, 64), (2, 2, 256, 64), (2, 2, 256, 32), (2, 4, 48, 32)]
    assert {(t.dtype, t.device.type) for t in (*x, x.grad_out)} == {
        (torch.float32, "cpu")
    }
    without = draw(name, SHAPES, seed=7, options={}, label="a")
    assert without.grad_out is None
    assert all(map(torch.equal, without, x))
    assert torch.equal(drawn(name, seed=7, label="a").grad_out, x.grad_out)
    for other in (drawn(name, seed=8, label="a"), drawn(name, seed=7, label="b")):
        assert not torch.equal(x.q, other.q)
        assert not torch.equal(x.v, other.v) or name == "ones"
        assert not torch.equal(x.grad_out, other.grad_out)
    for fmt in (*HALVES, "float32"):
        case = case_of(x, fmt)
        exact = attend(case)
        assert all(
            t.isfinite().all() for t in (case.q, case.k, case.v, exact.out, exact.lse)
        )
        assert float(exact.out.abs().max()) <= format_named(fmt).largest


def fingerprint() -> str:
    """A hash of every regime's draw."""
    digest = hashlib.sha256()
    for name in sorted(REGIMES):
        for x in drawn(name, seed=3, label="fingerprint"):
            digest.update(x.numpy().tobytes())
    return digest.hexdigest()


def test_drawn_numbers_stay() -> None:
    """All regimes' bits are those of the reports that exist: sha256 of q, k, v."""
    assert fingerprint()[:16] == "624063ff7872bbb0"


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="needs a vector instruction set",
)
def test_the_instruction_set_does_not_matter() -> None:
    """A machine without vector instructions draws the same bits: PyTorch's kernels and
    the C library's logarithms are then others."""
    code = "import test_inputs; print(test_inputs.fingerprint())"
    plain = {
        **os.environ,
        "ATEN_CPU_CAPABILITY": "default",
        "PYTHONPATH": f"{ROOT}:{ROOT}/tests:{ROOT}/tests/support",
    }
    plain["GLIBC_TUNABLES"] = "glibc.cpu.hwcaps=-AVX512F,-AVX2,-FMA,-FMA4"
    result = subprocess.check_output([sys.executable, "-c", code], env=plain, text=True)
    assert result.strip() == fingerprint()


def test_a_head_keeps_its_numbers() -> None:
    """More heads and a larger batch add numbers, and change none; no two heads or names
    agree."""
    draws = Draws(7, "a")
    few, more = draws.normal("k", (1, 2, 5, 3)), draws.normal("k", (4, 8, 5, 3))
    assert torch.equal(more[:1, :2], few)
    assert len({tuple(x.flatten().tolist()) for x in more.transpose(0, 1)}) == 8
    assert not torch.equal(draws.normal("v", (1, 2, 5, 3)), few)


@pytest.mark.parametrize("fmt", HALVES)
@pytest.mark.parametrize(("lse", "q", "dim", "n"), [
    (-120, 1.0, 64, 704), (-490, 1.0, 128, 65), (-5e4, 64.0, 256, 256), (-6e4, 64.0, 32, 1),
])  # fmt: skip
def test_far_below(fmt: str, lse: float, q: float, dim: int, n: int) -> None:
    """The log-sum-exp of every row is near what was asked. k's constant is off by at most
    half an ulp, a relative u; scores of N(0, 1) beside it spread a row's by a few."""
    shapes = dataclasses.replace(SHAPES, kv_len=n, head_dim=dim)
    result = attend(case_of(drawn("far_below", shapes, lse=lse, q=q), fmt)).lse
    assert bool(
        ((result - lse).abs() <= 7.0 + format_named(fmt).unit_roundoff * abs(lse)).all()
    )
    assert bool((result < -88.7).all())  # exp(-lse) overflows fp32


@pytest.mark.parametrize("fmt", HALVES)
def test_massive_channel(fmt: str) -> None:
    """One feature of q is 448, of k 1880 (an exact bf16 number, too); unscaled scores
    exceed float16, and outputs are those of the other features alone."""
    case = case_of(drawn("massive_channel"), fmt)
    assert bool((case.q[..., 32] == 448).all() & (case.k[..., 32] == 1880).all())
    assert 448 * 1880 > 65504
    others = dataclasses.replace(case, k=case.k.index_fill(-1, torch.tensor([32]), 0.0))
    # Scores near 1e5 in fp64 are good to 1e5 * 2^-53 * d.
    assert float((attend(case).out - attend(others).out).abs().max()) < 1e-8


@pytest.mark.parametrize(("name", "options", "says"), [
    ("outlier", {}, "unknown input regime 'outlier'; did you mean 'outliers'"),
    ("ties", {"cout": 2}, ("input regime ties has no parameter 'cout'; did you mean 'count'")),
    ("normal", {"shapes": 1}, ("regime normal has no parameter 'shapes'; did you mean 'values'")),
    ("normal", {"logits": "big"}, "normal does not work with logits='big'"),
    ("ties", {"count": 0}, "ties does not work with count=0: expected count >= 1"),
    ("ties", {"count": 1.5}, "count=1.5: .*; its parameters must be numbers"),
    ("border_ties", {"every": 0}, "every=0: expected every >= 1"),
    ("border_ties", {"every": 10**30}, "border_ties does not work with every=10000"),
    ("border_ties", {"every": 1.5}, "every=1.5: .*; its parameters must be numbers"),
    ("border_ties", {"every": 257}, "every >= 1 and at most the 256 keys, got 257"),
    ("one_signed_gradient", {"count": -1}, "count=-1: expected count >= 0"),
    ("one_sign", {"least": -0.5}, "least=-0.5: expected least >= 0"),
    ("outliers", {"variance": -1.0}, r"variance=-1\.0: expected variance >= 0 and rate"),
    ("outliers", {"rate": 1.5}, r"rate=1\.5: expected .* rate within \[0, 1\]"),
    ("far_below", {"q": 0.0}, "does not work with q=0.0: expected q other than 0"),
    ("low_rank", {"rank": 0}, "rank=0: expected rank >= 1"),
    ("low_rank", {"rank": -1}, "rank=-1: expected rank >= 1"),
    ("correlated", {"rho": 1.5}, r"rho=1\.5: expected rho within \[0, 1\]"),
    ("correlated", {"rho": math.nan}, r"rho=nan: expected rho within \[0, 1\]"),
    ("one_hot", {"margin": 0}, "margin=0: expected margin > 0"),
    ("two_hot", {"margin": 1e308}, r"margin=1e\+308: cannot convert float infinity"),
    ("near_overflow", {"peak": 10**400}, "peak=10000.*: .* too large"),
    ("normal", {"logits": 10**400}, "logits=10000"),
    ("normal", {"logits": 1e39}, r"logits=1e\+39: expected a q that is finite"),
    ("near_constant_keys", {"spread": math.nan}, "expected a k that is finite"),
    ("sink", {"value": math.inf}, "expected a v that is finite"),
    ("biased_rounding", {"count": 0}, "count=0: expected count >= 1, tail >= 0"),
    ("biased_rounding", {"v_bits": 1}, "v_bits=1: expected v_bits from 2 to 24"),
    ("biased_rounding", {"v_sign": 2}, "v_sign=2: expected a sign of 1, 0 or -1"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_said(
    name: str, options: dict[str, Any], says: str
) -> None:
    """An unknown regime or parameter gets the closest; a value that makes no sense, or
    with which what is drawn would not be finite, is named."""
    with pytest.raises(UsageError, match=says):
        draw(name, SHAPES, seed=0, options=options)


def test_ties_at_borders_of_few_keys() -> None:
    """Of one head too; without a border the default is refused, and named though it was
    not passed."""
    few = dataclasses.replace(SHAPES, batch=1, kv_heads=1, kv_len=10)
    words = "input regime border_ties does not work with its defaults: .* 10 keys, got 64"
    with pytest.raises(UsageError, match=words):
        drawn("border_ties", few)
    for every, tied in ((4, [0, 3, 4, 7, 8]), (10, [0, 9])):
        k = drawn("border_ties", few, every=every).k[0, 0]
        assert [i for i in range(10) if torch.equal(k[i], k[0])] == tied


BY_HAND = Shapes(batch=2, heads=2, kv_heads=1, q_len=12, kv_len=40, head_dim=64, v_dim=16)


@pytest.mark.parametrize("fmt", HALVES)
def test_numbers_are_exact_in_both_formats(fmt: str) -> None:
    """Rounding to bf16 or fp16 changes nothing, whatever the size of V."""
    for value in (1.0, 0.125, 8.0, 0.3):
        x = drawn("biased_rounding", BY_HAND, seed=4, value=value)
        assert all(
            torch.equal(round_to(t, format_named(fmt)), t) for t in (*x, x.grad_out)
        )


@pytest.mark.parametrize("tail", [0.0, 1e-6, 1e-3, 0.1])
def test_the_tail_weighs_what_was_asked(tail: float) -> None:
    """The mean over rows of sum exp(s - max) beside the ties. Its 38 terms scatter by a
    factor exp(0.25 N(0, 1)), relative 0.25 each and shared by rows that share keys; and
    the common score was rounded to bf16, by at most 2^-8 * 8 = 0.03. With `tail` 0 it is
    exactly 0."""
    x = drawn("biased_rounding", BY_HAND, seed=4, tail=tail)
    scores = x.q.double() @ x.k.double().mT.repeat_interleave(2, dim=1) / 8
    weights = (scores[..., 2:] - 8.0).exp().sum(dim=-1)
    assert float(weights.mean()) == pytest.approx(tail, rel=0.25, abs=0)


MASKED = Shapes(batch=3, heads=4, kv_heads=2, q_len=64, kv_len=100, head_dim=8, v_dim=8)
LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(64, 100), (1, 1), (1, 33), (33, 1), (2, 2)]
)
def test_a_mask_fits_its_case(kind: str, q_len: int, kv_len: int) -> None:
    """It broadcasts to the scores, is bool or additive fp32, has a seed, and YAML may
    name it."""
    shapes = dataclasses.replace(MASKED, q_len=q_len, kv_len=kv_len)
    mask = draw_mask(kind, shapes, seed=1)
    q, k, v = (torch.zeros(shape) for shape in (shapes.q, shapes.k, shapes.v))
    AttentionCase(ref=CaseRef(case="c"), q=q, k=k, v=v, scale=1.0, mask=mask)
    assert mask.dtype == (torch.float32 if kind.startswith("bias") else torch.bool)
    assert torch.equal(mask, draw_mask(kind, shapes, seed=1))
    seen = mask if mask.dtype == torch.bool else mask > LOWEST
    # A random one may hide all of three keys
    assert bool(seen.any()) or mask.numel() == 3


def test_the_page_names_every_regime_and_mask() -> None:
    """docs/hazards.md has each one's parameters, defaults, what it stresses and its
    origin."""
    page = (ROOT / "docs" / "hazards.md").read_text()
    sections = dict(re.findall(r"\n### (\w+)\n(.*?)(?=\n##)", page, re.DOTALL))
    assert sections.keys() == REGIMES.keys()
    for name, text in sections.items():
        parameters = list(inspect.signature(REGIMES[name]).parameters.values())[2:]
        listed = ", ".join(f"`{p.name}` {p.default}" for p in parameters)
        assert (
            f"- parameters: {listed}\n" in text
            if parameters
            else "- no parameters" in text
        )
        assert "- stresses: " in text
        assert "- origin: " in text
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(MASKS)


def test_every_cell_can_be_drawn() -> None:
    """With its regime's parameters, mask and layout; with gradients where they are
    wanted."""
    sweep = read_yaml(bundled_path("sweep/hazards.yaml"), SweepConfig)
    for located in source_of(sweep.cases).cases:
        config = located.config
        checked_regime(config.inputs.name, config.inputs.options)
        if config.seq_len * (config.kv_len or config.seq_len) > 2**17:
            continue  # seconds, and no other
        case = located.load()
        assert case.grad_out.shape == (*case.q.shape[:3], case.v.shape[3])
        assert (case.mask is not None) == (config.mask is not None)
        assert case.q.is_contiguous() == (
            config.layout == "contiguous" or case.q_len == 1
        )


def test_masks_and_layouts_change_no_numbers() -> None:
    """Cells of one entry share q, k, v and dO, whatever their mask and layout."""
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "seq_len": 9, "head_dim": 8}
    configs = [
        CaseConfig(name="a/x=1", axes={"x": 1}, mask=mask, layout=layout, **shape)
        for mask in (None, "random", "bias_lowest")
        for layout in get_args(Layout)
    ]
    first, *others = (located.load() for located in source_of(configs).cases)
    for case in others:
        for name in ("q", "k", "v", "grad_out"):
            assert torch.equal(getattr(case, name), getattr(first, name))


def test_what_each_mask_hides() -> None:
    """As docs/hazards.md says of each."""
    mask = {kind: draw_mask(kind, MASKED, seed=0) for kind in MASKS}
    assert bool(mask["all_true"].all())
    assert torch.equal(
        mask["causal"][0, 0], torch.arange(100) <= torch.arange(64)[:, None]
    )
    empty = ~mask["random"].any(dim=-1)
    assert bool(empty[:, :, 32].all() & ~empty[:, :, 0].any())
    assert 3 <= int(empty.sum()) <= 40  # 3 for certain, of 192 rows a tenth more
    assert float(mask["random"][~empty].double().mean()) == pytest.approx(0.6, abs=0.02)
    few = mask["mostly_masked"]
    assert float(few.double().mean()) == pytest.approx(0.03, abs=0.01)
    assert bool(few.tril().any(dim=-1).all())
    assert mask["padding"].sum(dim=-1).flatten().tolist() == [25, 50, 75]
    assert bool((mask["padding"].long().diff(dim=-1) <= 0).all())
    assert mask["one_empty"].any(dim=-1).flatten().tolist() == [False, True, True]
    assert mask["bias"].shape == (1, 4, 64, 100)
    assert bool(mask["bias"].isfinite().all())
    holes = mask["bias_inf"] == -math.inf
    assert not bool(holes.all(dim=-1).any())
    assert float(holes.double().mean()) == pytest.approx(0.4, abs=0.02)
    assert set(mask["bias_lowest"].unique().tolist()) == {0.0, LOWEST}
    assert bool((mask["bias_lowest"] == LOWEST).all(dim=-1).any())


PROBES = ("ones", "one_key", "uniform", "one_hot", "two_hot")
CODED = ("one_hot", "two_hot")
PROBED = Shapes(batch=2, heads=4, kv_heads=2, q_len=70, kv_len=101, head_dim=32, v_dim=24)
SQUARE_PROBED = dataclasses.replace(PROBED, q_len=65, kv_len=65)


def probe(
    name: str, shapes: Shapes = PROBED, fmt: str = HALVES[0], **fields: Any
) -> AttentionCase:
    """A case of the probe in a format; `options` are the regime's, the rest the
    case's."""
    q, k, v = draw(name, shapes, seed=3, options=fields.pop("options", {}))
    scale = fields.pop("scale", shapes.head_dim**-0.5)
    case = AttentionCase(ref=CaseRef(case=name), q=q, k=k, v=v, scale=scale, **fields)
    return case.rounded_to(format_named(fmt))


def answer(name: str, case: AttentionCase) -> Tensor:
    """The exact output, in fp64, of a case drawn with a probe, after any rounding; or
    0."""
    rows, keys = slice(0, case.q_len), slice(0, case.kv_len)
    seen = torch.ones((*case.q.shape[:3], case.kv_len), dtype=torch.bool)
    if (shown := visible(case, rows, keys)) is not None:
        seen = seen & shown
    if (scores := additive(case, rows, keys)) is not None:
        seen = seen & (scores != -math.inf)
    k, v = (x.double().repeat_interleave(case.group, dim=1) for x in (case.k, case.v))
    # The keys that match most signs, among those seen, share all the weight
    if name in CODED:
        matches = case.q.double().sign() @ k.sign().mT
        matches = matches.masked_fill(~seen, -math.inf)
        seen = seen & (matches == matches.amax(dim=-1, keepdim=True))
    return seen.double() @ v / seen.sum(dim=-1, keepdim=True).clamp_min(1)


def assert_known(name: str, case: AttentionCase) -> Tensor:
    """The answer and the reference differ by no more than fp64 arithmetic over kv_len
    terms, and the weight of the other keys (e^-40 each for the coded probes)."""
    formula, exact = answer(name, case), attend(case)
    assert formula.shape == exact.out.shape
    n = case.kv_len
    tolerance = (2 * n * 2**-53 + n * math.exp(-40)) * float(case.v.double().abs().max())
    assert float((formula - exact.out).abs().max()) <= tolerance
    return formula


@pytest.mark.parametrize("name", PROBES)
def test_answers_hold_in_every_format(name: str) -> None:
    """Of the rounded numbers; under causality and windows, with more keys than queries
    and the other way round; with one query, one key, one feature, and more keys than sign
    patterns."""
    for fmt in ("bfloat16", "float16", "float8_e4m3fn", "float64"):
        assert_known(name, probe(name, fmt=fmt))
    causal = {"is_causal": True}
    for fields in (
        causal,
        {**causal, "causal_offset": 31},
        {"window": (5, 5)},
        {"window": (5, 0)},
    ):
        assert_known(name, probe(name, **fields))
        assert_known(
            name, probe(name, dataclasses.replace(PROBED, q_len=101, kv_len=70), **fields)
        )
    for q_len, kv_len, dim in ((1, 1, 16), (1, 2, 1), (1, 300, 80), (129, 129, 256)):
        sizes = {"q_len": q_len, "kv_len": kv_len, "head_dim": dim, "v_dim": dim}
        assert_known(name, probe(name, Shapes(batch=1, heads=2, kv_heads=2, **sizes)))


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("dim", [1, 2, 3, 16])
@pytest.mark.parametrize("kv_len", [2, 3, 5, 40])
def test_the_margin_is_reached_with_few_features(
    name: str, dim: int, kv_len: int
) -> None:
    """Every score below the maximum is below it by the margin, though most keys have no
    pattern of their own."""
    shapes = dataclasses.replace(PROBED, q_len=9, kv_len=kv_len, head_dim=dim)
    case = probe(name, shapes, "float64")
    k = case.k.repeat_interleave(case.group, dim=1)
    S = case.q @ k.mT * case.scale
    below = S.amax(dim=-1, keepdim=True) - S
    assert bool(((below == 0) | (below >= 80.0)).all())


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", PROBES)
def test_answers_under_masks(name: str, kind: str) -> None:
    """Known under every mask that only hides, and under a bias if all values are
    alike."""
    if kind in ("bias", "bias_inf") and name not in ("ones", "one_key"):
        return
    case = probe(name, SQUARE_PROBED, mask=draw_mask(kind, SQUARE_PROBED, seed=0))
    formula, empty = assert_known(name, case), attend(case).empty
    assert bool((formula[empty] == 0).all())
    assert bool(empty.any()) == (kind in ("random", "bias_lowest", "one_empty"))


@pytest.mark.parametrize("name", ["uniform", *CODED])
def test_another_causal_mask_has_another_answer(name: str) -> None:
    case = probe(name, is_causal=True, causal_offset=31)
    wrong = attend(dataclasses.replace(case, causal_offset=30)).out
    assert float((answer(name, case) - wrong).abs().max()) > 0.01
