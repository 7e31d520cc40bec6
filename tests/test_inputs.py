"""Drawn inputs: each regime's defining property, and that a seed means the same numbers."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from numdev.errors import UsageError
from numdev.sources.draws import Draws
from numdev.sources.synthetic import REGIMES, Shapes, draw

ROOT = Path(__file__).parent.parent
SHAPES = Shapes(batch=2, heads=4, kv_heads=2, q_len=48, kv_len=256, head_dim=64, v_dim=32)
LARGE = Shapes(batch=4, heads=8, kv_heads=8, q_len=256, kv_len=256, head_dim=64, v_dim=64)


def drawn(  # type: ignore[no-untyped-def]
    name: str,
    shapes: Shapes = SHAPES,
    seed: int = 0,
    label: str = "",
    gradients: bool = False,
    **options: Any,
):
    return draw(name, shapes, seed=seed, options=options, label=label, gradients=gradients)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Scaled scores [B, H, q_len, kv_len] in fp64; each key's is summed alone and in the same
    order, so identical keys have identical scores."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    pairs = q.double()[:, :, :, None] * k[:, :, None]
    return pairs.sum(dim=-1) * q.shape[-1] ** -0.5


# --- every regime --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REGIMES)
def test_shapes_and_format(name: str) -> None:
    """q, k, v and dO have their own heads, lengths and widths, in fp32 on the CPU, all finite."""
    q, k, v = inputs = drawn(name, gradients=True)
    assert (tuple(q.shape), tuple(k.shape), tuple(v.shape)) == (
        (2, 4, 48, 64),
        (2, 2, 256, 64),
        (2, 2, 256, 32),
    )
    assert inputs.grad_out.shape == (2, 4, 48, 32)
    for x in (q, k, v, inputs.grad_out):
        assert (x.dtype, x.device.type) == (torch.float32, "cpu")
        assert x.isfinite().all()


@pytest.mark.parametrize("name", REGIMES)
def test_a_seed_means_the_same_numbers(name: str) -> None:
    """The same seed and label draw the same, another seed or label something else."""
    first = drawn(name, seed=7, label="a")
    assert all(
        torch.equal(x, y) for x, y in zip(first, drawn(name, seed=7, label="a"), strict=True)
    )
    for other in (drawn(name, seed=8, label="a"), drawn(name, seed=7, label="b")):
        assert not torch.equal(first.q, other.q)
        assert not torch.equal(first.v, other.v) or name == "ones"


@pytest.mark.parametrize("name", REGIMES)
def test_gradients_change_nothing(name: str) -> None:
    """q, k and v are the same bit for bit with grad_out and without, and it has a seed too."""
    without, with_it = drawn(name, seed=5), drawn(name, seed=5, gradients=True)
    assert without.grad_out is None
    assert all(torch.equal(x, y) for x, y in zip(without, with_it, strict=True))
    assert torch.equal(with_it.grad_out, drawn(name, seed=5, gradients=True).grad_out)
    assert not torch.equal(with_it.grad_out, drawn(name, seed=6, gradients=True).grad_out)


def test_drawn_numbers_stay() -> None:
    """All regimes' bits are those of the reports that exist: sha256 of q, k, v."""
    assert fingerprint()[:16] == "5a920a1fa376c395"


def test_the_first_numbers_of_a_stream() -> None:
    """numpy promises PCG64's bits, and not how its generator makes normals of them."""
    draws = Draws(0, "a")
    assert draws.normal("q", (1, 2, 2)).flatten().tolist() == [
        0.4447764456272125,
        -0.11641745269298553,
        0.07337742298841476,
        0.06816527992486954,
    ]
    assert draws.uniform("q", (1, 1, 2)).flatten().tolist() == [
        0.1757223048891322,
        0.5200596306203878,
    ]
    assert draws.integers("q", (1, 1, 6), 0, 10).flatten().tolist() == [6, 1, 4, 5, 5, 0]
    assert draws.permutation("q", 5).tolist() == [2, 3, 1, 4, 0]


def test_a_head_keeps_its_numbers() -> None:
    """More heads and a larger batch add numbers, and change none; no two heads or names agree."""
    draws = Draws(7, "a")
    few, more = draws.normal("k", (1, 2, 5, 3)), draws.normal("k", (4, 8, 5, 3))
    assert torch.equal(more[:1, :2], few)
    heads = {tuple(x.flatten().tolist()) for x in more.transpose(0, 1)}
    assert len(heads) == 8
    assert not torch.equal(draws.normal("v", (1, 2, 5, 3)), few)


def test_global_state_does_not_matter() -> None:
    """Neither torch's global generator nor its default format is used, or moved on."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = drawn("sink")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    torch.set_default_dtype(torch.float64)
    try:
        again = drawn("sink")
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def fingerprint() -> str:
    """A hash of every regime's draw."""
    digest = hashlib.sha256()
    for name in sorted(REGIMES):
        for x in drawn(name, seed=3, label="fingerprint"):
            digest.update(x.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="needs a vector instruction set"
)
def test_the_instruction_set_does_not_matter() -> None:
    """A machine without vector instructions draws the same bits: PyTorch's kernels and the C
    library's logarithms are then others."""
    code = (
        "import sys; sys.path.insert(0, 'tests'); import test_inputs as t; print(t.fingerprint())"
    )
    plain = {
        **os.environ,
        "ATEN_CPU_CAPABILITY": "default",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-FMA,-FMA4",
        "PYTHONPATH": str(ROOT),
    }
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=plain,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == fingerprint()


# --- what each regime stands for -----------------------------------------------------------------


def assert_moments(x: Tensor, variance: float, fourth: float) -> None:
    """Mean 0 and this variance, within 5 standard errors; `fourth` is the fourth moment."""
    n = x.numel()
    assert abs(float(x.double().mean())) <= 5 * math.sqrt(variance / n)
    error = math.sqrt((fourth - variance**2) / n)
    assert abs(float((x.double() ** 2).mean()) - variance) <= 5 * error


@pytest.mark.parametrize("logits", [0.25, 1.0, 16.0])
def test_normal(logits: float) -> None:
    """Independent N(0, 1); `logits` multiplies q, and with it the spread of the scores."""
    q, k, v = drawn("normal", LARGE, logits=logits)
    assert_moments(q / logits, 1.0, 3.0)
    assert_moments(k, 1.0, 3.0)
    assert_moments(v, 1.0, 3.0)
    spread = float(scores(q[:1, :1], k[:1, :1]).std())
    assert spread == pytest.approx(logits, rel=0.1)


@pytest.mark.parametrize(("rate", "variance"), [(0.001, 100.0), (0.01, 400.0)])
def test_outliers(rate: float, variance: float) -> None:
    """The fraction beyond 5 is what the mixture says, within 5 standard errors of a count: an
    N(0, 1 + variance) entry is beyond with probability erfc(5 / sqrt(2 (1 + variance))), others
    hardly ever."""
    for x in drawn("outliers", LARGE, rate=rate, variance=variance):
        p = (1 - rate) * math.erfc(5 / math.sqrt(2))
        p += rate * math.erfc(5 / math.sqrt(2 * (1 + variance)))
        n = x.numel()
        count = int((x.abs() > 5).sum())
        assert abs(count - n * p) <= 5 * math.sqrt(n * p * (1 - p))
        fourth = 3 * ((1 - rate) + rate * (1 + variance) ** 2)
        assert_moments(x, 1 + rate * variance, fourth)


@pytest.mark.parametrize("strength", [8.0, 16.0])
def test_sink(strength: float) -> None:
    """Key 0 has the highest score of every row, by about `strength` over the others' mean: its
    score is N(strength, 1), and the mean of n = 256 others N(0, 1 / n * (1 + strength^2 / d)),
    which together average out to `strength` over 384 rows within 5 / sqrt(384) and the second."""
    q, k, v = drawn("sink", strength=strength)
    s = scores(q, k)
    assert (s.argmax(dim=-1) == 0).all()
    margin = float((s[..., 0] - s[..., 1:].mean(dim=-1)).mean())
    noise = 5 / math.sqrt(384) + 5 * math.sqrt((1 + strength**2 / 64) / 256)
    assert abs(margin - strength) <= noise
    # 128 values of N(0, 0.01): their rms is within 5 standard errors, 5 / sqrt(2 * 128).
    assert float(v[:, :, 0].square().mean().sqrt()) == pytest.approx(0.1, rel=5 / math.sqrt(256))
    assert float(v[:, :, 1:].square().mean().sqrt()) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_ties(count: int) -> None:
    """Exactly `count` keys attain the row maximum, the first ones, bit for bit the same."""
    q, k, v = drawn("ties", count=count)
    s = scores(q, k)
    tied = s == s.amax(dim=-1, keepdim=True)
    assert (tied.sum(dim=-1) == count).all()
    assert tied[..., :count].all()
    assert (v[:, :, :count] <= -1).all()
    assert (v[:, :, count:] > 0).any()


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("outlier", {}, "unknown input regime 'outlier'; did you mean 'outliers'"),
        ("", {}, "unknown input regime ''; known: biased_rounding, correlated, far_below"),
        ("ties", {"cout": 2}, "input regime ties has no parameter 'cout'; did you mean 'count'"),
        ("normal", {"shapes": 1}, "input regime normal has no parameter 'shapes'; known: logits"),
        ("normal", {"logits": "big"}, "normal cannot be drawn with logits='big'"),
        ("normal", {"logits": None}, "normal cannot be drawn with logits=None"),
        ("ties", {"count": 2.5}, "ties cannot be drawn with count=2.5"),
        ("ties", {"count": 0}, "ties cannot be drawn with count=0: count must be at least 1"),
        ("ties", {"count": -1}, "count must be at least 1"),
        ("outliers", {"variance": -1.0}, r"outliers cannot be drawn with variance=-1\.0"),
    ],
)
def test_what_cannot_be_drawn_is_said(name: str, options: dict[str, Any], says: str) -> None:
    """An unknown regime or parameter gets the closest; a value that makes no sense is named."""
    with pytest.raises(UsageError, match=says):
        draw(name, SHAPES, seed=0, options=options)
