"""Single rows recomputed all at once: ties, carriers, what is asked of the device, and what not."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracles import FEATURES, make_case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from numdev import cases
from numdev.cases import AttentionCase
from numdev.formats import FORMATS
from numdev.kernels.reference import attend, gradients
from numdev.metrics import scrutiny
from numdev.metrics import worst_rows as worst
from numdev.metrics.deviation import Yardstick
from numdev.metrics.scrutiny import of_keys, of_queries
from numdev.metrics.worst_rows import worst_rows

VIEWS = {
    "alias", "detach", "expand", "select", "slice", "squeeze", "t", "transpose", "unbind",
    "unsqueeze", "view", "_reshape_alias", "_unsafe_view",
}  # fmt: skip
WAITS = {"_local_scalar_dense", "equal", "masked_select", "nonzero"}
ANY_DEVICE = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
        ],
    ),
]


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def llama(device: str, batch: int = 1) -> AttentionCase:
    """Grouped heads, causal, in bfloat16: a small layer."""
    case = make_case(
        batch=batch, heads=8, kv_heads=2, q_len=96, kv_len=96, head_dim=16, v_dim=16,
        is_causal=True, dtype=torch.bfloat16,
    )  # fmt: skip
    tensors = {name: getattr(case, name).to(device) for name in ("q", "k", "v")}
    grad_out = normal(1, *case.q.shape).bfloat16().to(device)
    return dataclasses.replace(case, **tensors, grad_out=grad_out)


def asked(case: AttentionCase, tensor: str) -> Callable[[], Any]:
    """A search for the worst rows of a tensor, all that it needs being known."""
    exact = gradients(case)
    terms = exact.term_scale if tensor == "out" else getattr(exact, f"{tensor}_terms")
    r = getattr(exact, tensor)
    empty = torch.zeros(r.shape[:3], dtype=torch.bool, device=r.device)
    y = Yardstick(reference=r, term_scale=terms, empty=empty, format=FORMATS["bfloat16"])
    out, predicted = (r + 1e-3 * terms * normal(s, *r.shape).to(r.device) for s in (1, 2))
    _ = y.usable, y.floor  # known from measuring
    rows = torch.arange(r.shape[2], device=r.device)
    return lambda: worst_rows(
        case, out, y, range(r.shape[1]), predicted=predicted, tensor=tensor, lse=exact.lse,
        rows=rows,
    )  # fmt: skip


# --- facts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ANY_DEVICE)
def test_equal_keys_tie_wherever_they_stand(device: str) -> None:
    """Two equal keys share the maximum, at any two places and although the terms of their score are
    10^9 times as large as it, so that its rounding is 10^6 times what counts as equal: it depends
    on the key alone."""
    n, d = 131, 16
    k = normal(0, 1, 1, n, d)
    k[..., 0], k[..., 1] = -400.0, 1880.0 * 2.0**20
    q = normal(1, 1, 1, n, d)
    q[..., 0], q[..., 1] = 1880.0 * 2.0**20, 400.0
    case = make_case(heads=1, q_len=n, kv_len=n, head_dim=d, v_dim=d, scale=1.0)
    for one, other in ((0, 1), (0, 130), (3, 67), (64, 65), (127, 128), (129, 130)):
        twin = k.clone()
        twin[0, 0, [one, other], 2:] = 40.0 * q[0, 0, 5, 2:]
        tensors = {"q": q.to(device), "k": twin.to(device), "v": case.v.to(device)}
        rows = torch.tensor([5, 17], device=device)
        found = of_queries(dataclasses.replace(case, **tensors), 0, torch.zeros_like(rows), rows)
        assert found["tied"].tolist() == [2, 1]


def test_equal_probabilities() -> None:
    """Of n equal scores, n a multiple of ten, exactly nine in ten carry 90 %, and all are tied."""
    for n in range(10, 400, 30):
        case = make_case(heads=1, q_len=2, kv_len=n)
        case = dataclasses.replace(case, q=torch.zeros_like(case.q))
        rows = torch.tensor([0, 1])
        found = of_queries(case, 0, torch.zeros_like(rows), rows)
        assert found["carriers"].tolist() == [n * 9 // 10] * 2
        assert found["tied"].tolist() == found["sees"].tolist() == [n, n]


def test_infinite_and_hidden_scores() -> None:
    """A row that sees nothing has no probability at all; of one whose score is infinite nothing is
    known, and its neighbour is as it was."""
    case = make_case(heads=1, q_len=3, kv_len=4, is_causal=True, causal_offset=-1)
    k = case.k.clone()
    k[0, 0, 1] = math.inf
    broken = dataclasses.replace(case, k=k, q=case.q.abs())
    rows = torch.tensor([0, 1, 2])
    b = torch.zeros_like(rows)
    found = of_queries(broken, 0, b, rows)
    plain = of_queries(dataclasses.replace(case, q=case.q.abs()), 0, b, rows)
    assert found["sees"].tolist() == [0, 1, 2]
    assert found["max_probability"][0] == 0
    assert found["first_key"][1] == plain["first_key"][1] == 1
    assert found["max_probability"][2].isnan()


@pytest.mark.parametrize("feature", FEATURES)
def test_rows_do_not_depend_on_each_other(feature: str) -> None:
    """Asked for in another order, or alone, a row has the same facts: those of other rows, batch
    entries and heads do not get in."""
    case = make_case(**{"seed": 3, **FEATURES[feature]})
    places = [(b, i) for b in range(case.q.shape[0]) for i in range(case.q_len)]
    b, i = (torch.tensor(x) for x in zip(*places, strict=True))
    head = case.heads - 1
    together = of_queries(case, head, b, i)
    other = case.select_heads([head])
    for n in range(len(places)):
        alone = of_queries(other, 0, b[n : n + 1], i[n : n + 1])
        for name, x in together.items():
            torch.testing.assert_close(x[n], alone[name][0], equal_nan=True, rtol=1e-12, atol=1e-12)


# --- what it costs -------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """Counts what is launched, and what waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masked = any(x is not None and x.dtype == torch.bool for x in indices)
        self.launches += name not in VIEWS
        self.waits += name in WAITS or masked
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    with Counted() as mode, monkeypatch.context() as patch:
        for name in ("tolist", "cpu", "numpy"):
            patch.setattr(Tensor, name, waiting(mode, getattr(Tensor, name)))
        yield mode


def waiting(mode: Counted, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        mode.waits += 1
        return function(*args, **kwargs)

    return wrapped


def test_waits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count sees an item, a list, a mask as an index, and a comparison."""
    x = torch.ones(3)
    for wait in (
        lambda: float(x[0]),
        lambda: x.tolist(),
        lambda: x[x > 0],
        lambda: torch.equal(x, x),
        lambda: bool(x.any()),
    ):
        with counted(monkeypatch) as mode:
            wait()
        assert mode.waits >= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("tensor", ["out", "dk"])
def test_on_a_gpu_the_host_waits_twice(tensor: str) -> None:
    """CUDA itself counts the waits; and the rows are those that a CPU finds, where term scales are
    fp64 throughout: here P in them is bf16, which is within 2^-8."""
    search = asked(llama("cuda"), tensor)
    found = search()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            search()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sum("called a synchronizing" in str(w.message) for w in caught) == 2
    same = asked(llama("cpu"), tensor)()
    assert [(w.head, w.row, w.tied, w.carriers) for w in found] == [
        (w.head, w.row, w.tied, w.carriers) for w in same
    ]
    for a, b in zip(found, same, strict=True):
        assert a.max_probability == pytest.approx(b.max_probability, rel=1e-9)
        assert a.ratio == pytest.approx(b.ratio, rel=2.0**-8)


@pytest.mark.parametrize("tensor", ["out", "dk"])
def test_scores_of_few_rows_of_one_head(tensor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are made once, of the heads that read one kv head, and of no more rows, or keys, than
    are looked at."""
    case, seen = llama("cpu"), []

    def visible(case: AttentionCase, rows: cases.Places, keys: cases.Places) -> Tensor | None:
        seen.append((case.heads, *(x for x in (rows, keys) if isinstance(x, Tensor))))
        return cases.visible(case, rows, keys)

    search = asked(case, tensor)
    search()  # what measuring would have computed is there
    seen.clear()
    monkeypatch.setattr(scrutiny, "visible", visible)
    search()
    ((heads, places),) = seen
    assert heads == (1 if tensor == "out" else case.group)
    assert len(places) == 3 + worst.TYPICAL


def test_keys_of_a_call_with_an_empty_row() -> None:
    """The log-sum-exp of a row that sees no key is -inf, and no key receives anything of it."""
    case = make_case(heads=1, q_len=4, kv_len=4, is_causal=True, causal_offset=-2)
    j = torch.arange(4)
    found = of_keys(case, 0, torch.zeros_like(j), j, attend(case).lse)
    assert found["sees"].tolist() == [2, 1, 0, 0]
    assert found["mass"].sum().item() == pytest.approx(2.0)  # two rows see keys
    assert found["carriers"].tolist()[2:] == [0, 0]
