"""Captured tensors on disk: what is written comes back, what others write is read, and a file that
is wrong is named in one line."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from on_bench import prepare
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef
from numdev.cli.main import main
from numdev.errors import MeasurementError, NumdevError, UsageError
from numdev.kernels.reference import attend
from numdev.sources.tensorfile import holds_cases, open_cases
from numdev.sources.tensorwriter import Writer, write

TENSORS = ("q", "k", "v", "mask", "sinks", "grad_out")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(name: str = "m#0", **changes: Any) -> AttentionCase:
    ref = CaseRef(case=name, source="model", module="m", layer=3, call=0, seed=7)
    qkv = {n: drawn(2, 4, 6, 8, seed=i) for i, n in enumerate("qkv")}
    return AttentionCase(**{"ref": ref, **qkv, "scale": 0.3, **changes})


def third_party(path: Path, tensors: dict[str, Tensor] | None = None, **header: Any) -> Path:
    """A file as somebody else would write it."""
    tensors = tensors or {f"0.{n}": drawn(2, 4, 6, 8, seed=i) for i, n in enumerate("qkv")}
    save_file(tensors, path, metadata={"numdev": json.dumps({"version": 1, **header})})
    return path


def only(path: Path) -> AttentionCase:
    (stored,) = open_cases(path).cases
    return stored.load()


def failure(path: Path, kind: type[NumdevError], *words: str) -> None:
    """Opening fails with this error, in one line that has these words and a hint."""
    with pytest.raises(kind) as caught:
        open_cases(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert caught.value.hint
    for word in words:
        assert word in message


def run(*arguments: object) -> int:
    try:
        main([str(a) for a in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def rows(directory: Path) -> tuple[list[Any], list[Any]]:
    report = json.loads((directory / "report.json").read_text())
    return report["rows"], report["cases"]


# --- there and back ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_causal": True, "causal_offset": -2},
        {"window": (3, None)},
        {"softcap": 0.5, "sinks": drawn(4)},
        {"mask": drawn(2, 1, 6, 6) > 0},
        {"mask": drawn(4, 6, 6)},
        {"mask": drawn(6)},
        {"grad_out": drawn(2, 4, 6, 8)},
        {"scale": 1 / 3, "k": drawn(2, 2, 6, 8), "v": drawn(2, 2, 6, 5)},
    ],
    ids=lambda c: "+".join(c) or "plain",
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_part_of_a_case_comes_back(
    tmp_path: Path, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    """Tensors bit for bit and in their format, numbers exactly, and the name."""

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    plain = {n: getattr(case(), n) for n in "qkv"}
    written = case(**{n: cast(x) for n, x in {**plain, **changes}.items()})
    write(tmp_path / "one.safetensors", [written])
    read = only(tmp_path / "one.safetensors")
    assert read.ref == written.ref
    for name in ("scale", "is_causal", "causal_offset", "window", "softcap"):
        assert getattr(read, name) == getattr(written, name)
    for name in TENSORS:
        ours, theirs = getattr(written, name), getattr(read, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("made", "strides"),
    [
        (drawn(2, 4, 6, 8), (192, 48, 8, 1)),
        (drawn(2, 6, 4, 8).transpose(1, 2), (192, 8, 32, 1)),
        (drawn(6, 2, 4, 8).permute(1, 2, 0, 3), (32, 8, 64, 1)),
        (drawn(2, 4, 8, 6).transpose(2, 3), (192, 48, 1, 6)),
        # Fused q, k, v: what lies between the rows goes, the order stays.
        (drawn(2, 6, 3, 4, 8)[:, :, 0].transpose(1, 2), (192, 8, 32, 1)),
        (drawn(2, 1, 6, 8).expand(2, 4, 6, 8), (192, 48, 8, 1)),
    ],
    ids=["bhsd", "bshd", "sbhd", "head_dim not last", "fused", "expanded"],
)
def test_strides_come_back(tmp_path: Path, made: Tensor, strides: tuple[int, ...]) -> None:
    """They decide which backends run; what comes back is laid out as a dense copy would be."""
    write(tmp_path / "one.safetensors", [case(q=made)])
    read = only(tmp_path / "one.safetensors").q
    assert torch.equal(read, made)
    assert read.stride() == strides == made.clone().stride()


def test_a_mask_keeps_its_strides(tmp_path: Path) -> None:
    """T5 makes its position bias [queries, keys, heads] and hands over a view of that."""
    bias = drawn(6, 6, 4).permute(2, 0, 1)[None]
    write(tmp_path / "one.safetensors", [case(mask=bias)])
    read = only(tmp_path / "one.safetensors").mask
    assert read is not None
    assert torch.equal(read, bias)
    assert read.stride()[1:] == bias.stride()[1:] == (1, 24, 4)


def test_tensors_that_share_memory_are_written(tmp_path: Path) -> None:
    """Keys that are also the values: safetensors refuses to store one memory twice."""
    shared = drawn(2, 4, 6, 8)
    write(tmp_path / "one.safetensors", [case(k=shared, v=shared)])
    assert torch.equal(only(tmp_path / "one.safetensors").v, shared)


def test_a_stored_case_is_plain_data_that_loads_anywhere(tmp_path: Path) -> None:
    """It survives pickling, so that any worker can load one call, by file and index."""
    write(tmp_path / "two.safetensors", [case("a"), case("b", q=drawn(2, 4, 6, 8, seed=9))])
    stored = pickle.loads(pickle.dumps(open_cases(tmp_path / "two.safetensors").cases[1]))
    assert stored.ref.case == "b"
    assert torch.equal(stored.load().q, drawn(2, 4, 6, 8, seed=9))


def test_opening_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is checked by shapes alone; a tensor is read when its case is loaded."""
    read: list[str] = []

    class Watched:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = safe_open(*args, **kwargs)

        def __enter__(self) -> Watched:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def get_tensor(self, name: str) -> Any:
            read.append(name)
            return self.file.get_tensor(name)

    write(tmp_path / "two.safetensors", [case("a"), case("b")])
    monkeypatch.setattr("numdev.sources.files.safe_open", Watched)
    opened = open_cases(tmp_path / "two.safetensors")
    assert read == []
    opened.cases[1].load()
    assert sorted(read) == ["1.k", "1.q", "1.v"]


def test_identity_is_that_of_the_bytes(tmp_path: Path) -> None:
    """Of a file the SHA-256 of its content, so that anybody can compare it."""
    import hashlib

    path = third_party(tmp_path / "x.safetensors")
    assert open_cases(path).identity() == hashlib.sha256(path.read_bytes()).hexdigest()


# --- what others write ---------------------------------------------------------------------------


def test_the_smallest_header_has_every_default(tmp_path: Path) -> None:
    """Three tensors and a version: 1/sqrt(d), not causal, no mask, named after the file."""
    read = only(third_party(tmp_path / "dump.safetensors"))
    assert read.ref == CaseRef(case="dump#0", source="dump.safetensors", module="dump#0")
    assert read.scale == 8**-0.5
    assert (read.is_causal, read.mask, read.window, read.softcap) == (False, None, None, None)
    assert read.q.is_contiguous()


def test_the_example_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ten lines in docs/inputs.md write a file that is read."""
    page = (Path(__file__).parent.parent / "docs" / "inputs.md").read_text()
    example = page.split("```python\n# Write a captured-tensor file")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec("# " + example, {})
    read = [c.load() for c in open_cases(Path("dump.safetensors")).cases]
    assert [c.ref.layer for c in read] == [0, 1]
    assert read[0].is_causal
    assert read[0].q.shape == (1, 8, 128, 64)
    assert read[0].q.stride()[1:] == (64, 512, 1)


def test_a_layout_is_that_of_the_stored_axes(tmp_path: Path) -> None:
    """bshd is flash-attention's, sbhd Megatron's; a call may differ from its file."""
    q = drawn(2, 4, 6, 8)
    orders = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}
    for layout, order in orders.items():
        tensors = {
            f"0.{n}": q.permute(order).clone(memory_format=torch.contiguous_format) for n in "qkv"
        }
        path = third_party(tmp_path / f"{layout}.safetensors", tensors, layout=layout)
        assert torch.equal(only(path).q, q)
    path = third_party(
        tmp_path / "own.safetensors", tensors, layout="bshd", calls=[{"layout": "sbhd"}]
    )
    assert torch.equal(only(path).q, q)


def test_a_mask_of_bytes_is_bool_where_the_header_says_so(tmp_path: Path) -> None:
    shown = drawn(6, 6) > 0
    tensors = {f"0.{n}": drawn(2, 4, 6, 8) for n in "qkv"} | {"0.mask": shown.to(torch.uint8)}
    path = third_party(tmp_path / "x.safetensors", tensors, calls=[{"mask": "bool"}])
    read = only(path).mask
    assert read is not None
    assert read.dtype == torch.bool
    assert torch.equal(read, shown)
    failure(third_party(tmp_path / "y.safetensors", tensors), UsageError, "mask is torch.uint8")


def explicit(read: AttentionCase, shown: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention written out in fp64, for hiding by `shown` and adding `bias`."""
    scores = read.q.double() @ read.k.double().mT * read.scale
    scores = (scores + (0 if bias is None else bias)).masked_fill(~shown, -math.inf)
    return torch.softmax(scores, -1) @ read.v.double()


@pytest.mark.parametrize(("offset", "seen_first"), [(0, 1), (4, 5)], ids=["top-left", "bottom"])
def test_causal_alignment_is_as_the_file_says(tmp_path: Path, offset: int, seen_first: int) -> None:
    """2 queries, 6 keys: top-left the first sees one key, bottom-right five."""
    tensors = {"0.q": drawn(1, 2, 2, 8)} | {f"0.{n}": drawn(1, 2, 6, 8, seed=2) for n in "kv"}
    header = {"calls": [{"is_causal": True, "causal_offset": offset}]}
    read = only(third_party(tmp_path / "x.safetensors", tensors, **header))
    shown = torch.ones(2, 6, dtype=torch.bool).tril(offset)
    assert shown[0].sum() == seen_first
    assert torch.allclose(attend(read).out, explicit(read, shown), rtol=0, atol=1e-13)


def test_alibi_is_a_bias(tmp_path: Path) -> None:
    """Head h adds -slope_h times the distance: an additive mask, and audited like any case."""
    slopes = 2.0 ** -torch.arange(1.0, 5.0)
    i = torch.arange(6.0)
    bias = -slopes[:, None, None] * (i[:, None] - i).abs()
    tensors = {f"0.{n}": drawn(2, 4, 6, 8, seed=j) for j, n in enumerate("qkv")}
    path = third_party(tmp_path / "x.safetensors", tensors | {"0.mask": bias})
    read = only(path)
    everything = torch.ones(6, 6, dtype=torch.bool)
    expected = explicit(read, everything, bias.double())
    assert torch.allclose(attend(read).out, expected, rtol=0, atol=1e-13)
    assert run("audit", path, "--kernel", "sdpa-math", "-o", tmp_path / "o", "-q") == 0
    measured, (record,) = rows(tmp_path / "o")
    assert record["mask"] == "additive"
    assert {r["status"] for r in measured} == {"ok"}


def test_a_packed_batch_is_a_case(tmp_path: Path) -> None:
    """Sequences of 3, 1 and 2 tokens packed into 6: a block-diagonal mask; each is as if alone."""
    blocks = torch.block_diag(*(torch.ones(n, n) for n in (3, 1, 2))).bool()
    tensors = {f"0.{n}": drawn(1, 4, 6, 8, seed=j) for j, n in enumerate("qkv")}
    path = third_party(tmp_path / "x.safetensors", tensors | {"0.mask": blocks})
    out, read = attend(only(path)).out, only(path)
    for part in (slice(0, 3), slice(3, 4), slice(4, 6)):
        alone = case(q=read.q[:, :, part], k=read.k[:, :, part], v=read.v[:, :, part])
        alone = attend(AttentionCase(**{**vars(alone), "scale": read.scale})).out
        assert torch.allclose(out[:, :, part], alone, rtol=0, atol=1e-14)
    assert run("audit", path, "--kernel", "sdpa-math", "-o", tmp_path / "o", "-q") == 0
    assert {r["status"] for r in rows(tmp_path / "o")[0]} == {"ok"}


# --- saved by an audit ---------------------------------------------------------------------------

KERNELS = ("--kernel", "sdpa-math", "--kernel", "sdpa-flash", "--kernel", "sdpa-efficient")
SMALL = (*KERNELS, "--length", 16, "--sequences", 2, "--format", "bfloat16", "--format", "float32")


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "gemma2", "gpt_oss"])
def test_an_audit_of_saved_cases_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    """All fields of all rows and cases, to the last bit, whatever the model passes on; the exit
    code too, which says of soft caps and sinks that no kernel here can run them."""
    model = models.save(getattr(models, name)(), tmp_path / name)
    saved, first, again = tmp_path / "saved", tmp_path / "first", tmp_path / "again"
    code = 3 if name in ("gemma2", "gpt_oss") else 0
    assert run("audit", model, *SMALL, "-o", first, "--save-cases", saved, "-q") == code
    assert run("audit", saved, *SMALL[:6], *SMALL[10:], "-o", again, "-q") == code
    assert rows(again) == rows(first)
    assert any(r["status"] == "ok" for r in rows(first)[0])


def test_cases_of_a_configuration_are_saved_with_their_axes(tmp_path: Path) -> None:
    config = tmp_path / "grid.yaml"
    config.write_text("cases: [{name: g, heads: 2, seq_len: [4, 9], head_dim: 8, causal: true}]")
    saved = tmp_path / "saved"
    assert run("audit", config, *KERNELS, "-o", tmp_path / "a", "--save-cases", saved, "-q") == 0
    assert run("audit", saved, *KERNELS, "-o", tmp_path / "b", "-q") == 0
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert [c["axes"] for c in rows(tmp_path / "b")[1]] == [{"seq_len": "4"}, {"seq_len": "9"}]


def test_layers_are_chosen_among_stored_calls(tmp_path: Path) -> None:
    path = third_party(
        tmp_path / "x.safetensors",
        {f"{i}.{n}": drawn(1, 1, 4, 8, seed=i) for i in range(3) for n in "qkv"},
        calls=[{"layer": i, "module": f"layers.{i}"} for i in range(3)],
    )
    output = tmp_path / "o"
    assert run("audit", path, "--kernel", "sdpa-math", "--layers", "1", "-o", output, "-q") == 0
    assert {r["case"] for r in rows(output)[0]} == {"layers.1#0"}


def test_saving_is_all_or_nothing(tmp_path: Path) -> None:
    """Interrupted, no directory appears and none is left behind."""

    def interrupted() -> None:
        with Writer(tmp_path / "saved") as writer:
            writer.add(case("a"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []
    with Writer(tmp_path / "saved") as writer:
        writer.add(case("a"))
        assert not (tmp_path / "saved").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_a_finished_audit_still_saves_its_cases(tmp_path: Path) -> None:
    """Asked for afterwards, they are written though no task is measured again."""
    model = models.save(models.llama(), tmp_path / "llama")
    assert run("audit", model, *SMALL, "-o", tmp_path / "o", "-q") == 0
    before = (tmp_path / "o" / "rows.jsonl").read_bytes()
    again = ("-o", tmp_path / "o", "--save-cases", tmp_path / "s", "-q")
    assert run("audit", model, *SMALL, *again) == 0
    assert (tmp_path / "o" / "rows.jsonl").read_bytes() == before
    assert len(open_cases(tmp_path / "s").cases) == 2


def test_memory_holds_one_case_at_a_time(tmp_path: Path) -> None:
    """Writing keeps no case: all that were added before are gone."""
    import weakref

    kept = []
    with Writer(tmp_path / "saved") as writer:
        for i in range(4):
            one = case(f"c{i}")
            writer.add(one)
            kept.append(weakref.ref(one))
            del one
            assert kept[-1]() is None
    assert len(open_cases(tmp_path / "saved").cases) == 4


def test_an_existing_place_is_not_written_over(tmp_path: Path) -> None:
    """--overwrite replaces saved cases, and nothing else."""
    with Writer(tmp_path / "saved") as writer:
        writer.add(case("a"))
    with pytest.raises(UsageError, match="exists"):
        Writer(tmp_path / "saved")
    with Writer(tmp_path / "saved", overwrite=True) as writer:
        writer.add(case("b"))
    assert [c.ref.case for c in open_cases(tmp_path / "saved").cases] == ["b"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(UsageError, match="exists"):
        Writer(tmp_path / "mine", overwrite=True)


def test_a_directory_with_a_file_missing_is_refused(tmp_path: Path) -> None:
    """Not a shorter report: the index knows how many there were."""
    with Writer(tmp_path / "saved") as writer:
        writer.add(case("a"))
        writer.add(case("b"))
    (tmp_path / "saved" / "00001.safetensors").unlink()
    failure(tmp_path / "saved", MeasurementError, "00001.safetensors is missing")


def test_files_that_others_put_into_one_directory_are_read_together(tmp_path: Path) -> None:
    """No index is needed; a trainer may write a file for every step."""
    for step in (1, 2):
        third_party(tmp_path / f"step{step}.safetensors")
    assert holds_cases(tmp_path)
    assert [c.ref.case for c in open_cases(tmp_path).cases] == ["step1#0", "step2#0"]


def test_a_file_of_weights_is_no_tensor_file(tmp_path: Path) -> None:
    """The header decides, not the name."""
    save_file({"weight": drawn(2, 2)}, tmp_path / "model.safetensors")
    assert not holds_cases(tmp_path / "model.safetensors")
    assert not holds_cases(tmp_path)


# --- what is wrong is named ----------------------------------------------------------------------

QKV = {f"0.{n}": drawn(2, 4, 6, 8, seed=i) for i, n in enumerate("qkv")}
MASKED = QKV | {"0.mask": torch.ones(6, 6, dtype=torch.bool)}
WRONG: dict[str, tuple[dict[str, Tensor], dict[str, Any], tuple[str, ...]]] = {
    "missing tensor": ({n: x for n, x in QKV.items() if n != "0.k"}, {}, ("no tensor 0.k",)),
    "call without tensors": (QKV, {"calls": [{}, {}]}, ("call 1", "no tensor 1.q")),
    "tensors without call": (QKV, {"calls": []}, ("no attention call",)),
    "no tensors": ({"0.sinks": drawn(4)}, {}, ("no tensor 0.q",)),
    "unknown tensor": (QKV | {"0.attn_mask": drawn(6, 6)}, {}, ("'0.attn_mask'", "grad_out")),
    "gap": (QKV | {"2.q": drawn(1)}, {}, ("2.q", "no call 2")),
    "head_dim": (QKV | {"0.k": drawn(2, 4, 6, 9)}, {}, ("call 0", "head_dim", "8 and 9")),
    "length": (QKV | {"0.v": drawn(2, 4, 5, 8)}, {}, ("do not fit together",)),
    "rank": (QKV | {"0.q": drawn(4, 6, 8)}, {}, ("q has shape [4, 6, 8]",)),
    "scalar": (QKV | {"0.q": torch.tensor(1.0)}, {}, ("q has shape []",)),
    "empty": ({f"0.{n}": drawn(2, 4, 6, 0) for n in "qkv"}, {}, ("an axis is empty",)),
    "formats": (QKV | {"0.v": drawn(2, 4, 6, 8).half()}, {}, ("differ in format",)),
    "integers": ({n: x.to(torch.int64) for n, x in QKV.items()}, {}, ("I64", "BF16")),
    "layout": (QKV | {"0.k": drawn(2, 6, 4, 8)}, {}, ("do not fit together", "layout")),
    "mask shape": (QKV | {"0.mask": drawn(5, 6)}, {}, ("mask has shape [5, 6]",)),
    "sinks shape": (QKV | {"0.sinks": drawn(3)}, {}, ("sinks have shape [3]",)),
    "grad_out shape": (QKV | {"0.grad_out": drawn(2, 4, 6, 7)}, {}, ("grad_out has shape",)),
    "mask kind": (
        MASKED,
        {"calls": [{"mask": "padding"}]},
        ("calls.0.mask", "'none', 'bool' or 'additive'", "'padding'"),
    ),
    "mask kind of another mask": (MASKED, {"calls": [{"mask": "additive"}]}, ("mask is bool",)),
    "mask kind without mask": (QKV, {"calls": [{"mask": "bool"}]}, ("its mask is missing",)),
    "mask kind none": (MASKED, {"calls": [{"mask": "none"}]}, ("'none'", "mask is bool")),
    "misspelt key": (QKV, {"calls": [{"soft_cap": 5.0}]}, ("'calls.0.soft_cap'", "'softcap'")),
    "misspelt key above": (QKV, {"sauce": "x"}, ("'sauce'", "'source'")),
    "unknown layout": (QKV, {"layout": "bhds "}, ("layout", "'bhds '", "'bshd'")),
    "layout of a call": (QKV, {"calls": [{"layout": {"q": "bhs"}}]}, ("calls.0.layout", "'bhs'")),
    "softcap": (QKV, {"calls": [{"softcap": -1}]}, ("calls.0.softcap", "-1")),
    "scale": (QKV, {"calls": [{"scale": "big"}]}, ("calls.0.scale", "'big'")),
    "window": (QKV, {"calls": [{"window": [-1, 0]}]}, ("calls.0.window.0", "-1")),
    "causal": (QKV, {"calls": [{"is_causal": "yes"}]}, ("calls.0.is_causal", "'yes'")),
    "no alignment": (
        QKV | {"0.q": drawn(2, 4, 2, 8)},
        {"calls": [{"is_causal": True}]},
        ("causal_offset", "0 (top-left", "4 (bottom-right"),
    ),
    "one name twice": (
        QKV | {n.replace("0", "1", 1): x.clone() for n, x in QKV.items()},
        {"calls": [{"module": "m"}, {"module": "m"}]},
        ("2 calls are called 'm#0'",),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, what: str) -> None:
    """Before anything is measured, in one line, with the file, the call and what to do."""
    tensors, header, words = WRONG[what]
    failure(third_party(tmp_path / "x.safetensors", tensors, **header), UsageError, *words)


@pytest.mark.parametrize(
    ("metadata", "kind", "words"),
    [
        ("{version: 1}", UsageError, ("not valid JSON",)),
        ("[1]", UsageError, ("gives no version",)),
        ("{}", UsageError, ("gives no version",)),
        ('{"version": 2}', MeasurementError, ("version 2", "reads version 1")),
        ("[" * 100_000, UsageError, ("not valid JSON",)),
    ],
    ids=["not JSON", "list", "no version", "version 2", "nested"],
)
def test_a_header_that_cannot_be_read(
    tmp_path: Path, metadata: str, kind: type[NumdevError], words: tuple[str, ...]
) -> None:
    save_file(QKV, tmp_path / "x.safetensors", metadata={"numdev": metadata})
    failure(tmp_path / "x.safetensors", kind, *words)


def test_a_truncated_file_is_damaged(tmp_path: Path) -> None:
    path = third_party(tmp_path / "x.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    failure(path, MeasurementError, "not a whole safetensors file")


def test_errors_come_out_as_one_line_and_the_right_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 for what the writer got wrong, 3 for a damaged file; no traceback, nothing on stdout."""
    wrong = third_party(tmp_path / "wrong.safetensors", calls=[{"mask": "padding"}])
    torn = third_party(tmp_path / "torn.safetensors")
    torn.write_bytes(torn.read_bytes()[:-1])
    right = third_party(tmp_path / "right.safetensors")
    output = ("-o", tmp_path / "o")
    for code, arguments in (
        (2, (wrong,)),
        (3, (torn,)),
        (2, (right, "--model", "a.b:c")),
        (2, (right, "--text", tmp_path / "t.txt")),
        (2, (right, "--save-cases", tmp_path)),
        (3, (right, "--layers", "0")),  # none of its calls says its layer
    ):
        assert run("audit", *arguments, *output) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("numdev: error: ")
        assert err.count("\n") == 1
        assert ";" in err


def test_a_file_that_changes_during_the_audit_is_found_out(tmp_path: Path) -> None:
    path = third_party(tmp_path / "x.safetensors")
    (stored,) = open_cases(path).cases
    save_file({"0.q": drawn(1)}, path)
    with pytest.raises(MeasurementError, match="changed"):
        prepare(stored.load()).case  # noqa: B018
