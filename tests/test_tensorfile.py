"""Captured tensors on disk: what is written comes back, what others write is read, a file
that is wrong is named in one line; and calls as serving engines make them become the
cases they are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from commands import run
from oracles import FEATURES, make_case, with_grad
from safetensors.torch import save_file
from torch import Tensor

import numdev
from numdev import report
from numdev.cases import AttentionCase, CaseRef
from numdev.errors import MeasurementError, NumdevError, UsageError
from numdev.formats import format_named
from numdev.kernels.reference import attend
from numdev.sources.captured_calls import (
    headerless_hint,
    open_cases,
    write_cases,
    writing_cases,
)

TENSORS = ("q", "k", "v", "mask", "sinks", "grad_out")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(name: str = "m#0", **changes: Any) -> AttentionCase:
    ref = CaseRef(case=name, source="model", module="m", layer=3, call=0, seed=7)
    qkv = {n: drawn(2, 4, 6, 8, seed=i) for i, n in enumerate("qkv")}
    return AttentionCase(**{"ref": ref, **qkv, "scale": 0.3, **changes})


def third_party(
    path: Path, tensors: dict[str, Tensor] | None = None, **header: Any
) -> Path:
    """A file as somebody else would write it."""
    tensors = tensors or {
        f"0.{n}": drawn(2, 4, 6, 8, seed=i) for i, n in enumerate("qkv")
    }
    save_file(tensors, path, metadata={"numdev": json.dumps({"version": 1, **header})})
    return path


def only(path: Path) -> AttentionCase:
    (stored,) = open_cases(path).cases
    return stored.load()


def failure(path: Path, kind: type[NumdevError], *words: str) -> None:
    """Opening fails with this error, in one line that names the file and has these
    words."""
    with pytest.raises(kind) as caught:
        open_cases(path)
    assert "\n" not in str(caught.value)
    assert [word for word in (str(path), *words) if word not in str(caught.value)] == []


@pytest.mark.parametrize("changes", [
    {}, {"is_causal": True, "causal_offset": -2}, {"window": (3, None)},
    {"softcap": 0.5, "sinks": drawn(4)}, {"mask": drawn(2, 1, 6, 6) > 0}, {"mask": drawn(4, 6, 6)},
    {"mask": drawn(6)}, {"grad_out": drawn(2, 4, 6, 8)},
    {"scale": 1 / 3, "k": drawn(2, 2, 6, 8), "v": drawn(2, 2, 6, 5)},
], ids=lambda c: "+".join(c) or "plain")  # fmt: skip
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_every_part_of_a_case_comes_back(
    tmp_path: Path, changes: Any, dtype: torch.dtype
) -> None:
    """Tensors bit for bit and in their format, numbers exactly, and the name."""

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    plain = {n: getattr(case(), n) for n in "qkv"}
    written = case(**{n: cast(x) for n, x in {**plain, **changes}.items()})
    write_cases(tmp_path / "one.safetensors", [written])
    read = only(tmp_path / "one.safetensors")
    assert read.ref == written.ref
    for name in ("scale", "is_causal", "causal_offset", "window", "softcap"):
        assert getattr(read, name) == getattr(written, name)
    for name in TENSORS:
        ours, theirs = getattr(written, name), getattr(read, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs))


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_of_a_case_comes_back(tmp_path: Path, feature: str) -> None:
    """A call without it would be another one, on which a kernel may be right."""
    written = with_grad(make_case(**FEATURES[feature]))
    write_cases(tmp_path / "one.safetensors", [written])
    read = vars(only(tmp_path / "one.safetensors"))
    for name, ours in vars(written).items():
        if isinstance(ours, Tensor):
            assert torch.equal(read[name], ours), name
        elif name != "ref":
            assert read[name] == ours, name


@pytest.mark.parametrize(("created", "strides"), [
    (drawn(2, 4, 6, 8), (192, 48, 8, 1)), (drawn(2, 6, 4, 8).transpose(1, 2), (192, 8, 32, 1)),
    (drawn(6, 2, 4, 8).permute(1, 2, 0, 3), (32, 8, 64, 1)),
    (drawn(2, 4, 8, 6).transpose(2, 3), (192, 48, 1, 6)),
    # Fused q, k, v: what lies between the rows goes, the order stays.
    (drawn(2, 6, 3, 4, 8)[:, :, 0].transpose(1, 2), (192, 8, 32, 1)),
    (drawn(2, 1, 6, 8).expand(2, 4, 6, 8), (192, 48, 8, 1)),
])  # fmt: skip
def test_strides_come_back(
    tmp_path: Path, created: Tensor, strides: tuple[int, ...]
) -> None:
    """They decide which backends run; what comes back is laid out as a dense copy would
    be. And tensors may share memory, which safetensors refuses to store twice."""
    write_cases(tmp_path / "one.safetensors", [case(q=created, k=created, v=created)])
    read = only(tmp_path / "one.safetensors")
    assert all(torch.equal(x, created) for x in (read.q, read.k, read.v))
    assert read.q.stride() == strides == created.clone().stride()


def test_the_example_of_the_docs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ten lines in docs/inputs.md write a file that is read."""
    page = (Path(__file__).parent.parent / "docs" / "inputs.md").read_text()
    example = page.split("```python\n# Write a captured-tensor file")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec("# " + example, {})
    first, second = (c.load() for c in open_cases(Path("dump.safetensors")).cases)
    assert (first.ref.layer, second.ref.layer, first.is_causal) == (0, 1, True)
    assert (first.q.shape, first.q.stride()[1:]) == ((1, 8, 128, 64), (64, 512, 1))


def test_a_mask_of_bytes_is_bool_where_the_header_says_so(tmp_path: Path) -> None:
    shown = drawn(6, 6) > 0
    tensors = {f"0.{n}": drawn(2, 4, 6, 8) for n in "qkv"} | {
        "0.mask": shown.to(torch.uint8)
    }
    path = third_party(tmp_path / "x.safetensors", tensors, calls=[{"mask": "bool"}])
    read = only(path).mask
    assert read.dtype == torch.bool
    assert torch.equal(read, shown)


KERNELS = (
    "--kernel",
    "sdpa-math",
    "--kernel",
    "sdpa-flash",
    "--kernel",
    "sdpa-efficient",
)
SMALL = (
    *KERNELS,
    "--length",
    16,
    "--sequences",
    2,
    "--format",
    "bfloat16",
    "--format",
    "float32",
)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "gemma2", "gpt_oss"])
def test_an_audit_of_saved_cases_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    """All fields of all rows and cases, to the last bit, whatever the model passes on;
    the exit code too, which says of soft caps and sinks that no kernel here can run
    them."""
    model = models.save(getattr(models, name)(), tmp_path / name)
    saved, first, again = tmp_path / "saved", tmp_path / "first", tmp_path / "again"
    code = 3 if name in ("gemma2", "gpt_oss") else 0
    assert run("audit", model, *SMALL, "-o", first, "--save-cases", saved, "-q") == code
    assert run("audit", saved, *SMALL[:6], *SMALL[10:], "-o", again, "-q") == code
    a, b = (json.loads((at / "report.json").read_text()) for at in (first, again))
    assert (a["rows"], a["cases"]) == (b["rows"], b["cases"])
    assert any(row["status"] == "ok" for row in a["rows"])


def save(directory: Path, *names: str, **options: Any) -> None:
    with writing_cases(directory, **options) as add:
        for name in names:
            if name == "Ctrl-C":
                raise KeyboardInterrupt
            add(case(name), {})
            assert options or not directory.exists()


def test_saving_is_all_or_nothing(tmp_path: Path) -> None:
    """Interrupted, no directory appears and none is left behind; a file that is lost
    later is no shorter report, since the index knows how many there were."""
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "saved", "a", "Ctrl-C")
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "saved", "a", "b")
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    (tmp_path / "saved" / "00001.safetensors").unlink()
    failure(tmp_path / "saved", MeasurementError, "'00001.safetensors' is missing")
    for files in ("5", "null", "[]", '"00000.safetensors"', "{}"):
        (tmp_path / "saved" / "cases.json").write_text(
            f'{{"version": 1, "files": {files}}}'
        )
        failure(tmp_path / "saved", MeasurementError, "its file '' is missing")


def test_an_existing_place_is_not_written_over(tmp_path: Path) -> None:
    """--overwrite replaces saved cases, and nothing else."""
    save(tmp_path / "saved", "a")
    with pytest.raises(UsageError, match="exists"):
        save(tmp_path / "saved")
    save(tmp_path / "saved", "b", overwrite=True)
    assert [c.ref.case for c in open_cases(tmp_path / "saved").cases] == ["b"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(UsageError, match="exists"):
        save(tmp_path / "mine", overwrite=True)


QKV = {f"0.{n}": drawn(2, 4, 6, 8, seed=i) for i, n in enumerate("qkv")}
MASKED = QKV | {"0.mask": torch.ones(6, 6, dtype=torch.bool)}
TWICE = QKV | {n.replace("0", "1", 1): x.clone() for n, x in QKV.items()}
SHORT = QKV | {"0.q": drawn(2, 4, 2, 8)}


@pytest.mark.parametrize(("tensors", "header", "words"), [
    ({n: x for n, x in QKV.items() if n != "0.k"}, {}, ("no tensor 0.k",)),
    (QKV, {"calls": [{}, {}]}, ("call 1", "no tensor 1.q")),
    (QKV | {"2.q": drawn(1)}, {}, ("tensors of call 2", "got 2 calls")),
    (QKV | {"0.attn_mask": drawn(6, 6)}, {}, ("'0.attn_mask'", "grad_out")),
    (QKV | {"0.k": drawn(2, 4, 6, 9)}, {}, ("call 0", "head_dim", "8 and 9")),
    (QKV | {"0.k": drawn(2, 6, 4, 8)}, {}, ("do not fit together", "layout")),
    (QKV | {"0.mask": drawn(6, 6).byte()}, {}, ("mask: expected", "got torch.uint8")),
    (MASKED, {"calls": [{"mask": "padding"}]}, ("calls.0.mask", "'bool' or 'additive'")),
    (MASKED, {"calls": [{"mask": "additive"}]}, ("expected additive", "got bool")),
    (QKV, {"calls": [{"soft_cap": 5.0}]}, ("'calls.0.soft_cap'", "'softcap'")),
    (QKV, {"sauce": "x"}, ("'sauce'", "'source'")),
    (QKV, {"layout": "bhds "}, ("layout", "'bhds '", "'bhsd'")),
    (QKV, {"calls": [{"layout": {"q": "bhs"}}]}, ("calls.0.layout", "'bhs'")),
    (QKV, {"calls": [{"scale": "big"}]}, ("calls.0.scale",)),
    (QKV, {"calls": [{"window": [2**70, 0]}]}, ("call 0", "window (1180", "beyond 2^60")),
    (QKV, {"calls": [{"causal_offset": -(2**63)}]}, ("causal_offset -922", "beyond 2^60")),
    (SHORT, {"calls": [{"is_causal": True}]}, ("causal_offset", "0 (top-left", "4 (bottom")),
    (TWICE, {"calls": [{"module": "m"}] * 2}, ("2 calls are named 'm#0'",)),
])  # fmt: skip
def test_what_is_wrong_is_named(
    tmp_path: Path, tensors: Any, header: Any, words: Any
) -> None:
    """Before anything is measured, in one line, with the file, the call and what to
    do."""
    failure(
        third_party(tmp_path / "x.safetensors", tensors, **header), UsageError, *words
    )


@pytest.mark.parametrize(("layout", "doubted"), [("bhsd", True), ("bshd", False)])
def test_more_heads_than_tokens_are_doubted(
    tmp_path: Path, layout: str, doubted: bool
) -> None:
    """128 tokens of 8 heads, written as kernels take them; the report asks whether they
    are."""
    tensors = {f"0.{n}": drawn(1, 128, 8, 4, seed=i) for i, n in enumerate("qkv")}
    path = third_party(tmp_path / "x.safetensors", tensors, layout=layout)
    created = numdev.audit(
        path, kernels=["sdpa-math"], formats=["bfloat16"], device="cpu"
    )
    what = "In 1 of 1 calls the heads exceed the length in number: is `layout` right?"
    assert (what in created.tested) is doubted


HEADS, KV_HEADS, DIM, PAGE = 4, 2, 8, 4
QUERIES, KEYS = (5, 1, 0, 3), (5, 9, 0, 7)
"""A prefill, a decode step, a sequence that is only padding, and a chunk after four
keys."""


def begins(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)


def packed() -> dict[str, Any]:
    """q, k and v behind each other, with four rows of padding after the queries."""
    q, k = drawn(sum(QUERIES) + 4, HEADS, DIM), drawn(sum(KEYS), KV_HEADS, DIM, seed=1)
    v = drawn(sum(KEYS), KV_HEADS, DIM + 2, seed=2)[..., :DIM]
    return dict(q=q, k=k, v=v, cu_seqlens_q=begins(QUERIES), cu_seqlens_k=begins(KEYS))


def paged() -> dict[str, Any]:
    """The same keys in pages of four that lie in no order, the rest of each page full of
    NaN."""
    passed = packed()
    caches = {n: torch.full((12, PAGE, KV_HEADS, DIM), math.nan) for n in "kv"}
    free = iter((7, 2, 11, 0, 5, 9, 3))
    table = torch.full((len(KEYS), 3), -1, dtype=torch.int32)
    for i, (start, count) in enumerate(zip(begins(KEYS).tolist(), KEYS, strict=False)):
        for page in range(-(-count // PAGE)):
            table[i, page] = place = next(free)
            of_page = slice(start + PAGE * page, start + min(count, PAGE * (page + 1)))
            for n, cache in caches.items():
                cache[place, : of_page.stop - of_page.start] = passed[n][of_page]
    whole = {name: passed[name] for name in ("q", "cu_seqlens_q")}
    lengths = torch.tensor(KEYS, dtype=torch.int32)
    return {**whole, **caches, "seqused_k": lengths, "block_table": table}


def attention(
    q: Any, k: Any, v: Any, *, scale: float, left: int | None, causal: bool
) -> Any:
    """One sequence in numpy, aligned at the last key: [queries, heads, dim] from packed
    tensors."""
    out = np.zeros((len(q), HEADS, v.shape[-1]))
    for head, i in np.ndindex(HEADS, len(q)):
        at, of_sequence = i + len(k) - len(q), head // (HEADS // KV_HEADS)
        seen = slice(
            0 if left is None else max(0, at - left), at + 1 if causal else len(k)
        )
        weights = np.exp(k[seen, of_sequence] @ q[i, head] * scale)
        out[i, head] = weights @ v[seen, of_sequence] / weights.sum()
    return out


@pytest.mark.parametrize("passed", [packed, paged])
@pytest.mark.parametrize(("causal", "left"), [(True, None), (False, None), (True, 2)])
def test_a_packed_call_is_one_case_a_sequence(
    passed: Any, causal: bool, left: int | None
) -> None:
    """Each case in fp64 is what plain loops over packed tensors give; a scale 1 % off is
    not."""
    whole = packed()
    window = {} if left is None else {"window_size": (left, 0)}
    cases = numdev.varlen_cases(**passed(), causal=causal, softmax_scale=0.3, **window)
    assert [c.ref.case for c in cases] == [f"attention#0/seq{i}" for i in (0, 1, 3)]
    q, k, v = (whole[n].double().numpy() for n in "qkv")
    rows, keys = begins(QUERIES).tolist(), begins(KEYS).tolist()
    for i, case in zip((0, 1, 3), cases, strict=True):
        of_sequence = (
            q[rows[i] : rows[i + 1]],
            *(x[keys[i] : keys[i + 1]] for x in (k, v)),
        )
        wanted = attention(*of_sequence, scale=0.3, left=left, causal=causal)
        wrong = attention(*of_sequence, scale=0.303, left=left, causal=causal)
        result = attend(case).out[0].transpose(0, 1).numpy()
        np.testing.assert_allclose(result, wanted, rtol=1e-12, atol=1e-13)
        assert not np.allclose(result, wrong, rtol=1e-12, atol=1e-13)


def test_cases_are_copies() -> None:
    """The engine overwrites its cache, and the case stays."""
    passed = paged()
    case = numdev.varlen_cases(**passed)[1]
    before = case.k.clone()
    passed["k"].zero_()
    assert torch.equal(case.k, before)
    assert case.k.isfinite().all()


def test_flash_attentions_words_for_nothing() -> None:
    """softcap 0 and a window of (-1, -1) are none; -1 on a side is no limit there."""
    case = numdev.varlen_cases(**packed(), softcap=0.0, window_size=(-1, -1))[0]
    assert (case.softcap, case.window) == (None, None)
    case = numdev.varlen_cases(**packed(), softcap=30.0, window_size=(3, -1))[0]
    assert (case.softcap, case.window) == (30.0, (3, None))
    assert numdev.varlen_cases(**packed(), causal=True, window_size=(3, -1))[
        0
    ].window == (3, 0)


@pytest.mark.parametrize(("passed", "changes", "says"), [
    (packed, {"cu_seqlens_q": torch.tensor([0, 6, 5])}, "cu_seqlens_q: expected"),
    (packed, {"cu_seqlens_k": None}, r"got .*none"),
    (packed, {"cu_seqlens_k": torch.tensor([0, 5])}, r"got .*\[5\], \[2\]"),
    (packed, {"seqused_k": torch.tensor([6, 9, 0, 7])}, ("sequence 0: expected 6 keys, got 5")),
    (paged, {"block_table": torch.zeros(1, 3)}, r"\[1, 3\]"),
    (paged, {"block_table": torch.full((4, 3), 12)}, "expected pages below 12"),
    (paged, {"seqused_k": torch.tensor([5, 13, 0, 7])}, "expected 13 keys, got 12"),
    (packed, {"window_size": (3,)}, r"window_size: .* got \[3\]"),
])  # fmt: skip
def test_what_does_not_fit_together_is_refused(
    passed: Any, changes: Any, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        numdev.varlen_cases(**{**passed(), **changes})


def test_what_cannot_be_saved_or_holds_no_call(tmp_path: Path) -> None:
    """The path that was asked for is named, and nothing is left beside it."""
    cases = numdev.varlen_cases(**paged())
    (tmp_path / "folder.safetensors").mkdir()
    for name, says in (
        ("none/dump.safetensors", "No such file or directory"),
        ("folder.safetensors", "Is a directory"),
    ):
        with pytest.raises(UsageError) as caught:
            numdev.save_cases(tmp_path / name, cases)
        assert str(caught.value) == f"{tmp_path / name}: cannot be written ({says})"
    assert [path.name for path in tmp_path.iterdir()] == ["folder.safetensors"]
    for files in ("[]", "5", '{"a": 1}', "null"):
        (tmp_path / "folder.safetensors" / "cases.json").write_text(
            f'{{"files": {files}}}'
        )
        with pytest.raises(MeasurementError, match="its file '' is missing"):
            open_cases(tmp_path / "folder.safetensors")
    (tmp_path / "folder.safetensors" / "cases.json").unlink()
    with pytest.raises(
        UsageError, match=r"expected captured tensors, got no \.safetensors file"
    ):
        open_cases(tmp_path / "folder.safetensors")


SOME_ROWS = case(is_causal=True).restrict(rows=torch.tensor([1, 3]))
META = dict.fromkeys("qkv", drawn(2, 4, 6, 8).to("meta"))


@pytest.mark.parametrize(("wrong", "says"), [
    (SOME_ROWS, "expected a whole call, got 2 rows of one"),
    (case().rounded_to(format_named("e4m5")), "expected a format that torch has, got e4m5"),
    (case(**META), "expected tensors with values, got meta"),
    (case(window=(-1, 0)), "window: expected greater than or equal to 0, got -1"),
    (case(ref=CaseRef(case="m#0", layer=-1)), "layer: expected greater than or equal to 0, got -1"),
])  # fmt: skip
def test_a_case_that_no_file_can_hold_is_refused(
    tmp_path: Path, wrong: AttentionCase, says: str
) -> None:
    """None comes back as another function; the case is named, and nothing is written."""
    with pytest.raises(UsageError) as caught:
        numdev.save_cases(tmp_path / "dump.safetensors", [wrong])
    assert str(caught.value) == f"saving attention case 'm#0': {says}"
    assert list(tmp_path.iterdir()) == []


def test_rows_that_see_all_keys_come_back(tmp_path: Path) -> None:
    """Where position hides nothing, some rows of a call are a call."""
    some = case(mask=drawn(6, 6)).restrict(rows=torch.tensor([1, 3]))
    write_cases(tmp_path / "one.safetensors", [some])
    assert torch.equal(attend(only(tmp_path / "one.safetensors")).out, attend(some).out)


def test_a_file_with_a_header_needs_no_hint_on_it(tmp_path: Path) -> None:
    """The hint is for the same tensors without one."""
    path = third_party(tmp_path / "x.safetensors")
    assert headerless_hint(path) == headerless_hint(tmp_path) == ""
    save_file({"0.q": drawn(1), "0.k": drawn(1), "0.v": drawn(1)}, path)
    assert "need a header" in headerless_hint(path)


def test_a_dump_is_audited_by_phase(tmp_path: Path, capsys: Any) -> None:
    """Two layers' calls in one file: the same tensors come back, rows know the phase, and
    the report sets prefill beside decode."""
    cases = []
    for i in range(2):
        how = {
            "causal": True,
            "module": f"layers.{i}.attn",
            "layer": i,
            "source": "engine",
        }
        cases += numdev.varlen_cases(**paged(), **how)
    numdev.save_cases(tmp_path / "dump.safetensors", cases)
    stored = open_cases(tmp_path / "dump.safetensors").cases
    assert [s.ref for s in stored] == [c.ref for c in cases]
    assert all(torch.equal(s.load().k, c.k) for s, c in zip(stored, cases, strict=True))
    flags = ("--kernel", "sdpa-math", "--device", "cpu", "-o", tmp_path / "o")
    assert run("audit", tmp_path / "dump.safetensors", *flags) == 0
    result = report.read(tmp_path / "o")
    (phases,) = (k.phases for k in result.summary.kernels if k.kernel == "sdpa-math")
    assert [part.phase for part in phases] == ["prefill", "decode"]
    assert "bfloat16: prefill beside decode" in capsys.readouterr().out
