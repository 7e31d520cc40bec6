"""The adapters for external packages, each against a stand-in of its documented
interface.

The stand-ins compute in float64 and round once. Their arguments, and what they refuse,
are those of flash-attn 2.8, flash_attn_interface (flash-attn-3), flash_attn.cute
(flash-attn-4, 4.0) and flashinfer 0.6."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from typing import Any

import pytest
import torch
from oracles import make_case
from torch import Tensor

from numdev.cases import AttentionCase, empty_rows
from numdev.kernels import Output, Refused, find
from numdev.kernels.reference import attend, gradients
from numdev.kernels.sdpa import flash_attention_2
from numdev.system import System


def plain(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, *, softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of one sequence [length, heads, .]; its log-sum-exp [heads, length]."""
    group = q.shape[1] // k.shape[1]
    wide_q, *wide = (x.double().transpose(0, 1) for x in (q, k, v))
    wide_k, wide_v = (x.repeat_interleave(group, dim=0) for x in wide)
    S = wide_q @ wide_k.mT * scale
    if softcap:
        S = softcap * torch.tanh(S / softcap)
    S = S.masked_fill(hidden, -math.inf)
    if sinks is not None:
        S = torch.cat([S, sinks.double()[:, None, None].expand(*S.shape[:2], 1)], dim=-1)
    L = torch.logsumexp(S, dim=-1)
    empty = torch.isneginf(L)
    P = torch.exp(S - L.masked_fill(empty, 0.0)[..., None])[..., : k.shape[0]]
    return (P @ wide_v).transpose(0, 1).to(q.dtype), L.float()


def beyond(n: int, m: int, left: int, right: int, offset: int) -> Tensor:
    """True where a window hides a key: query i is at key i + offset. A side below 0: no
    limit."""
    distance = torch.arange(m)[None, :] - torch.arange(n)[:, None] - offset
    return ((left >= 0) & (distance < -left)) | ((right >= 0) & (distance > right))


COMMON = ("softmax_scale", "causal", "window_size", "softcap", "deterministic")
SPLIT = ("num_splits", "pack_gqa")
# By module: what it takes, a side of a window without a limit, and what asks for the
# log-sum-exp.
MODULES: dict[str, tuple[tuple[str, ...], int | None, str]] = {
    "flash_attn": (COMMON, -1, "return_attn_probs"),
    "flash_attn_interface": ((*COMMON, *SPLIT), -1, "return_attn_probs"),
    "flash_attn.cute": ((*COMMON, *SPLIT, "learnable_sink"), None, "return_lse"),
}


def flash(name: str) -> types.ModuleType:
    """One of the modules of MODULES."""
    allowed, unlimited, asks = MODULES[name]

    def sequence(
        q: Tensor, k: Tensor, v: Tensor, passed: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        assert q.dtype == k.dtype == v.dtype
        assert q.dtype in (torch.float16, torch.bfloat16)
        assert q.shape[-1] <= 256
        assert name != "flash_attn" or v.shape[-1] == q.shape[-1]
        sink = passed.get("learnable_sink")
        assert sink is None or sink.dtype == torch.bfloat16
        assert all(side == unlimited or side >= 0 for side in passed["window_size"])
        left, right = (-1 if side is None else side for side in passed["window_size"])
        n, m = q.shape[0], k.shape[0]
        hidden = beyond(n, m, left, 0 if passed["causal"] else right, m - n)
        return plain(
            q,
            k,
            v,
            hidden,
            passed["softmax_scale"],
            softcap=passed["softcap"],
            sinks=sink,
        )

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, **passed: Any
    ) -> tuple[Tensor, ...]:
        """[batch, length, heads, head_dim], and the log-sum-exp [batch, heads,
        length]."""
        assert passed.pop(asks)
        assert passed.keys() <= set(allowed)
        parts = [sequence(*x, passed) for x in zip(q, k, v, strict=True)]
        return torch.stack([x[0] for x in parts]), torch.stack([x[1] for x in parts])

    module = types.ModuleType(name)
    module.flash_attn_func = flash_attn_func
    return module


class Ragged:
    """FlashInfer's wrapper of keys that lie behind one another."""

    def __init__(self, workspace: Tensor, *, backend: str) -> None:
        assert workspace.dtype == torch.uint8
        self._backend = {"auto": "fa2"}.get(backend, backend)
        self._plan_info: list[int] = []

    def plan(self, rows: Tensor, keys: Tensor, *sizes: int, **passed: Any) -> None:
        self.rows, self.keys, self.sizes, self.passed = rows, keys, sizes, passed
        assert rows.dtype == keys.dtype == torch.int32
        n, group = int(rows[1]), sizes[0] // sizes[1]
        # 4 rows, 2 parts
        self._plan_info = [2 * (len(rows) - 1) * -(-n * group // 4), 0, 0, 4]

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool
    ) -> tuple[Tensor, ...]:
        assert return_lse
        assert (q.shape[1], k.shape[1], q.shape[2]) == self.sizes[:3]
        passed, mask, parts = self.passed, self.passed.get("custom_mask"), []
        for (a, b), (c, d) in zip(*(x.unfold(0, 2, 1).tolist() for x in (self.rows, self.keys)),
                                  strict=True):  # fmt: skip
            n, m = b - a, d - c
            right = 0 if passed["causal"] else -1
            hidden = beyond(n, m, passed["window_left"], right, m - n)
            if mask is not None:
                hidden, mask = ~mask[: n * m].view(n, m), mask[n * m :]
            cap = passed["logits_soft_cap"]
            parts.append(
                plain(q[a:b], k[c:d], v[c:d], hidden, passed["sm_scale"], softcap=cap)
            )
        out, L = torch.cat([x for x, _ in parts]), torch.cat([x.T for _, x in parts])
        return out, L / math.log(2)


class Paged(Ragged):
    """Of keys in pages."""

    def plan(self, rows: Tensor, pages: Tensor, *sizes_left: Any, **passed: Any) -> None:
        self.places, lasts, *sizes, self.size = sizes_left
        counts = pages.diff()
        keys = ((counts - 1) * self.size + lasts).cumsum(0)
        self.pages = pages
        super().plan(rows, torch.nn.functional.pad(keys, (1, 0)).int(), *sizes, **passed)

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], *, return_lse: bool) -> Any:  # type: ignore[override]
        k, v = (
            torch.cat([x[self.places[a:b].long()].flatten(0, 1)[:n] for (a, b), n in zip(
                self.pages.unfold(0, 2, 1).tolist(), self.keys.diff().tolist(), strict=True)])
            for x in cache
        )  # fmt: skip
        return super().run(q, k, v, return_lse=return_lse)


def infer() -> types.ModuleType:
    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithRaggedKVCacheWrapper = Ragged
    module.BatchPrefillWithPagedKVCacheWrapper = Paged
    return module


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All stand-ins where imports find them, for one test."""
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, flash(name))
    monkeypatch.setitem(sys.modules, "flashinfer", infer())


FLASH = ("flash-attn-2", "flash-attn-3", "flash-attn-4")
H200 = System(device="cuda", gpu="NVIDIA H200", capability=(9, 0), processors=132)
# Shapes that no layout can be taken for another in; head dimensions that all of them
# take.
SHAPE: dict[str, Any] = {"batch": 3, "heads": 4, "kv_heads": 2, "head_dim": 8}
LONG: dict[str, Any] = {"q_len": 5, "kv_len": 9, "causal_offset": 4}
CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "one head each": {"heads": 3, "kv_heads": 3},
    "one query": {"q_len": 1, "kv_len": 9}, "causal": {"q_len": 6, "kv_len": 6, "is_causal": True},
    "causal, more keys": {**LONG, "is_causal": True},
    "causal, more queries": {"q_len": 9, "kv_len": 5, "causal_offset": -4, "is_causal": True},
    "sliding window": {**LONG, "is_causal": True, "window": (2, 0)},
    "sliding window, open to the right": {**LONG, "is_causal": True, "window": (2, None)},
    "causal with a window that hides nothing": {**LONG, "is_causal": True, "window": (None, None)},
    "another scale": {"scale": 0.9}, "window": {**LONG, "window": (2, 1)},
    "window, left only": {**LONG, "window": (1, None)},
    "window, right only": {**LONG, "window": (None, 2)},
    "window, own key": {**LONG, "window": (0, 0)},
}  # fmt: skip


def case_of(fields: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> AttentionCase:
    return make_case(**{**SHAPE, **fields}, dtype=dtype)


def assert_rounded(result: Tensor, exact: Tensor, empty: Tensor) -> None:
    """The exact answer rounded once, with 1 % for float64; rows that see nothing are
    0."""
    u = 2.0**-8 if result.dtype == torch.bfloat16 else 2.0**-11
    expected = exact.masked_fill(empty[..., None], 0.0)
    # Below the smallest normal number of float16 the spacing is 2^-24.
    assert (
        (result.double() - expected).abs() <= 1.01 * u * expected.abs() + 2.0**-24
    ).all()


def assert_right(case: AttentionCase, result: Output) -> None:
    """Output and log-sum-exp are the reference's, the latter to float32."""
    exact, empty = attend(case), empty_rows(case)
    assert_rounded(result.out, exact.out, empty)
    off = (
        (result.lse.double() - exact.lse)
        .masked_fill(empty & (case.sinks is None), 0.0)
        .abs()
    )
    assert (off <= 2.0**-23 * (1 + exact.lse.masked_fill(empty, 0.0).abs())).all()


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize("feature", CASES)
def test_adapters_say_everything_right(installed: None, name: str, feature: str) -> None:
    """Output and log-sum-exp are the fp64 reference's, rounded once."""
    for dtype in (torch.bfloat16, torch.float16):
        case = case_of(CASES[feature], dtype)
        assert_right(case, find(name).attend(case))


MASKS: dict[str, dict[str, Any]] = {
    "mask": {**LONG, "mask": ("bool", "qk")},
    "mask by sequence": {**LONG, "mask": ("bool", "b1qk")},
    "mask, causal": {**LONG, "mask": ("bool", "qk"), "is_causal": True},
}  # fmt: skip


@pytest.mark.parametrize("page_size", [None, 1, 4])
@pytest.mark.parametrize("feature", [*MASKS, *CASES])
def test_flashinfer_is_told_everything_right(
    installed: None, feature: str, page_size: int | None
) -> None:
    """Ragged and paged; of windows those that end at the query's key or are open."""
    for dtype in (torch.bfloat16, torch.float16):
        fields = {**SHAPE, **{**CASES, **MASKS}[feature], "head_dim": 64}
        case, infer = make_case(**fields, dtype=dtype), find("flashinfer")
        if case.window is not None and case.window[1] is not None and not case.is_causal:
            with pytest.raises(Refused, match="left side of a window alone"):
                infer.attend(case, page_size=page_size)
        else:
            output = infer.attend(case, page_size=page_size)
            assert_right(case, output)
            assert output.did == {"backend": "fa2", "splits": 2}


def test_the_comparison_rejects() -> None:
    """Another alignment, window or order of heads, a scale off by 1 %, other heads'
    log-sum-exp."""
    case = case_of(CASES["sliding window"])
    changes = ({}, {"causal_offset": 0}, {"window": (3, 0)}, {"scale": 1.01 * case.scale},
               {"k": case.k.flip(1), "v": case.v.flip(1)})  # fmt: skip
    cases = (dataclasses.replace(case, **x) for x in changes)
    right, *wrong = (attend(x) for x in cases)
    assert_right(case, Output(out=right.out.to(case.q.dtype), lse=right.lse))
    for out, lse in ((right.out, right.lse.flip(1)), *((x.out, x.lse) for x in wrong)):
        with pytest.raises(AssertionError):
            assert_right(case, Output(out=out.to(case.q.dtype), lse=lse))


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize(
    "feature", ["causal, more keys", "sliding window", "one head each"]
)
def test_gradients_come_back_through_the_layouts(
    installed: None, name: str, feature: str
) -> None:
    """Autograd's dq, dk and dv are the reference's, rounded once, in the case's own
    layout."""
    case = case_of(CASES[feature])
    dO = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(1)).to(case.q)
    case = dataclasses.replace(case, grad_out=dO)
    result, exact = find(name).gradients(case), gradients(case)
    for tensor in ("dq", "dk", "dv"):
        g = getattr(exact, tensor)
        assert_rounded(
            getattr(result, tensor), g, torch.zeros(g.shape[:-1], dtype=torch.bool)
        )


def test_flashinfer_has_no_masks_in_its_newer_kernels(installed: None) -> None:
    with pytest.raises(Refused, match="fa3 kernels take no mask"):
        find("flashinfer").attend(
            case_of({**MASKS["mask"], "head_dim": 64}), backend="fa3"
        )


TOP_LEFT: dict[str, Any] = {"is_causal": True, "q_len": 3, "kv_len": 7}


@pytest.mark.parametrize(("names", "fields", "says"), [
    (FLASH, {"dtype": torch.float32}, "takes float16 and bfloat16"),
    (FLASH, {"mask": ("bool", "qk")}, "takes no mask"),
    (FLASH, {"head_dim": 264}, "head dimensions up to 256"),
    (FLASH, TOP_LEFT, "bottom-right, an offset of 4, not 0"),
    (FLASH, {**TOP_LEFT, "causal_offset": 3}, "an offset of 4, not 3"),
    (FLASH, {"window": (1, 1)}, "an offset of 1, not 0"),
    (FLASH, {"window": (-1, 2), "kv_len": 4}, "a window below 0"),
    (("flash-attn-2", "flash-attn-3"), {"sinks": True}, "no attention sinks"),
    (("flash-attn-4",), {"sinks": True, "dtype": torch.float16}, ("sinks in bfloat16 only")),
    (("flash-attn-2",), {"v_dim": 16}, "V of the head dimension of Q"),
    (("flash-attn-3", "flash-attn-4"), {"head_dim": 12}, "multiples of 8"),
    (("flash-attn-4",), {"v_dim": 12}, "multiples of 8"),
    (("flashinfer",), {}, "takes head_dim"),
    (("flashinfer",), {"head_dim": 64, "dtype": torch.float32}, ("takes float16 and bfloat16")),
    (("flashinfer",), {"head_dim": 64, "sinks": True}, "no attention sinks"),
    (("flashinfer",), {"head_dim": 64, "mask": ("float", "qk")}, "masks of bool"),
    (("flashinfer",), {"head_dim": 64, "mask": ("bool", "bhqk")}, ("one mask for all heads")),
    (("flashinfer",), {"head_dim": 64, **LONG, "window": (2, 1)}, ("left side of a window alone")),
    (("flashinfer",), {"head_dim": 64, **TOP_LEFT}, "bottom-right, an offset of 4"),
])  # fmt: skip
def test_what_they_cannot_do(
    names: tuple[str, ...], fields: dict[str, Any], says: str
) -> None:
    """What a package, or one version, does not take is refused in a sentence, without
    it."""
    case = make_case(**{"dtype": torch.bfloat16, "head_dim": 8, **fields})
    for name in names:
        with pytest.raises(Refused, match=says):
            find(name).attend(case)


def test_claims() -> None:
    """Version 2 is PyTorch's copy; the others document no tiles; approximate tanh has
    none."""
    case, none = case_of({"kv_len": 4000}), Output(out=torch.zeros(1))
    claim = flash_attention_2(case, H200)
    assert claim["splits"] > 1
    for name in FLASH:
        recipe = {"preset": "fa2", "group_sum": "running"}
        assert find(name).claims(case, none, H200) == (
            claim if name == "flash-attn-2" else recipe
        )
        assert find(name).claims(case_of({"softcap": 2.0}), none, H200) is None
    parts = {"l_from": "rounded", "merge": "working", "splits": 3}
    for backend, more in (("fa2", parts), ("fa3", {})):
        output = Output(out=torch.zeros(1), did={"backend": backend, "splits": 3})
        assert find("flashinfer").claims(case, output, H200) == {"preset": "fa2", **more}
    assert find("flashinfer").claims(case, none, H200) is None
    many = Output(
        out=none.out, did={"backend": "fa2", "splits": 1 + 1024 // case.v.shape[-1]}
    )
    assert find("flashinfer").claims(case, many, H200) is None
