"""Calls as serving engines make them, packed and paged, become the cases they are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import numdev
from numdev import report
from numdev.cli.main import main
from numdev.errors import UsageError
from numdev.kernels import find
from numdev.sources.tensorfile import open_cases

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 8, 4
QUERIES, KEYS = (5, 1, 0, 3), (5, 9, 0, 7)
"""A prefill, a decode step, a sequence that is only padding, and a chunk after four keys."""


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def begins(counts: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)


def packed() -> dict[str, Any]:
    """q, k and v behind each other, with four rows of padding after the queries."""
    return {
        "q": drawn(sum(QUERIES) + 4, HEADS, DIM),
        "k": drawn(sum(KEYS), KV_HEADS, DIM),
        "v": drawn(sum(KEYS), KV_HEADS, DIM + 2)[..., :DIM],
        "cu_seqlens_q": begins(QUERIES),
        "cu_seqlens_k": begins(KEYS),
    }


def paged() -> dict[str, Any]:
    """The same keys in pages of four that lie in no order, the rest of each page full of NaN."""
    given = packed()
    caches = {n: torch.full((12, PAGE, KV_HEADS, DIM), math.nan) for n in "kv"}
    free = iter((7, 2, 11, 0, 5, 9, 3))
    table = torch.full((len(KEYS), 3), -1, dtype=torch.int32)
    for i, (start, count) in enumerate(zip(begins(KEYS).tolist(), KEYS, strict=False)):
        for page in range(-(-count // PAGE)):
            table[i, page] = place = next(free)
            held = slice(start + PAGE * page, start + min(count, PAGE * (page + 1)))
            for n, cache in caches.items():
                cache[place, : held.stop - held.start] = given[n][held]
    return {
        "q": given["q"],
        **caches,
        "cu_seqlens_q": given["cu_seqlens_q"],
        "seqused_k": torch.tensor(KEYS, dtype=torch.int32),
        "block_table": table,
    }


def attention(q: Any, k: Any, v: Any, *, scale: float, left: int | None, causal: bool) -> Any:
    """One sequence in numpy, aligned at the last key: [queries, heads, dim] from packed tensors."""
    out = np.zeros((len(q), HEADS, v.shape[-1]))
    for head, i in np.ndindex(HEADS, len(q)):
        at, own = i + len(k) - len(q), head // (HEADS // KV_HEADS)
        seen = slice(0 if left is None else max(0, at - left), at + 1 if causal else len(k))
        weights = np.exp(k[seen, own] @ q[i, head] * scale)
        out[i, head] = weights @ v[seen, own] / weights.sum()
    return out


@pytest.mark.parametrize("given", [packed, paged])
@pytest.mark.parametrize(("causal", "left"), [(True, None), (False, None), (True, 2)])
def test_a_packed_call_is_one_case_a_sequence(given: Any, causal: bool, left: int | None) -> None:
    """Each case, attended in fp64, is what plain loops over the packed tensors give for its rows;
    1 % off in the scale is not."""
    whole = packed()
    window = {} if left is None else {"window_size": (left, 0)}
    cases = numdev.varlen_cases(**given(), causal=causal, softmax_scale=0.3, **window)
    assert [c.ref.case for c in cases] == [f"attention#0/seq{i}" for i in (0, 1, 3)]
    q, k, v = (whole[n].double().numpy() for n in "qkv")
    rows, keys = begins(QUERIES).tolist(), begins(KEYS).tolist()
    for i, case in zip((0, 1, 3), cases, strict=True):
        own = (q[rows[i] : rows[i + 1]], *(x[keys[i] : keys[i + 1]] for x in (k, v)))
        wanted = attention(*own, scale=0.3, left=left, causal=causal)
        wrong = attention(*own, scale=0.303, left=left, causal=causal)
        found = find("reference").attend(case).out[0].transpose(0, 1).numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-13)
        assert not np.allclose(found, wrong, rtol=1e-12, atol=1e-13)


def test_cases_are_copies() -> None:
    """The engine overwrites its cache, and the case stays."""
    given = paged()
    case = numdev.varlen_cases(**given)[1]
    before = case.k.clone()
    given["k"].zero_()
    assert torch.equal(case.k, before)
    assert case.k.isfinite().all()


def test_flash_attentions_words_for_nothing() -> None:
    """softcap 0 and a window of (-1, -1) are none; -1 on a side is no limit there."""
    case = numdev.varlen_cases(**packed(), softcap=0.0, window_size=(-1, -1))[0]
    assert (case.softcap, case.window) == (None, None)
    case = numdev.varlen_cases(**packed(), softcap=30.0, window_size=(3, -1))[0]
    assert (case.softcap, case.window) == (30.0, (3, None))
    assert numdev.varlen_cases(**packed(), causal=True, window_size=(3, -1))[0].window == (3, 0)


@pytest.mark.parametrize(
    ("given", "changes", "says"),
    [
        (packed, {"cu_seqlens_q": torch.tensor([0, 6, 5])}, "cu_seqlens_q: expected"),
        (packed, {"cu_seqlens_k": None}, r"got .*none"),
        (packed, {"cu_seqlens_k": torch.tensor([0, 5])}, r"got .*\[5\], \[2\]"),
        (packed, {"seqused_k": torch.tensor([6, 9, 0, 7])}, "sequence 0: expected 6 keys, got 5"),
        (paged, {"block_table": torch.zeros(1, 3)}, r"\[1, 3\]"),
        (paged, {"block_table": torch.full((4, 3), 12)}, "expected pages below 12"),
        (paged, {"seqused_k": torch.tensor([5, 13, 0, 7])}, "expected 13 keys, got 12"),
        (packed, {"window_size": (3,)}, r"window_size: .* got \[3\]"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    given: Any, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        numdev.varlen_cases(**{**given(), **changes})


def test_a_dump_is_audited_by_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two layers' calls in one file: the same tensors come back, rows know the phase, and the
    report sets prefill beside decode."""
    cases = []
    for i in range(2):
        how = {"causal": True, "module": f"layers.{i}.attn", "layer": i, "source": "engine"}
        cases += numdev.varlen_cases(**paged(), **how)
    numdev.save_cases(tmp_path / "dump.safetensors", cases)
    stored = open_cases(tmp_path / "dump.safetensors").cases
    assert [s.ref for s in stored] == [c.ref for c in cases]
    assert all(torch.equal(s.load().k, c.k) for s, c in zip(stored, cases, strict=True))
    flags = ("--kernel", "sdpa-math", "--device", "cpu", "-o", str(tmp_path / "o"))
    main(["audit", str(tmp_path / "dump.safetensors"), *flags])
    found = report.read(tmp_path / "o")
    phases = [part.phase for part in found.summary.parts if part.kernel == "sdpa-math"]
    assert phases == ["prefill", "decode"]
    assert "bfloat16: prefill beside decode" in capsys.readouterr().out
