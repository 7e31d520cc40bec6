"""`numdev weights` as a user meets it: what is compared, what is said, and the exit
codes."""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import ran, unstarted
from safetensors.torch import save_file
from scipy.stats import wasserstein_distance
from stored import Calls, distributed, sharded
from torch import Tensor
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.filesystem import _StorageInfo

from numdev import report
from numdev.errors import MeasurementError
from numdev.report.number_text import ratio
from numdev.sources.distributed_checkpoint import read_metadata
from numdev.studies.training.weights.report import WeightsReport
from numdev.studies.training.weights.study import KINDS, kind_by_name, weights
from numdev.studies.training.weights.tensor_comparison import (
    CASTS,
    cast_costs,
    pool_sums,
    row_numbers,
)
from numdev.studies.training.weights.tensor_comparison import compare_pair as compared
from numdev.studies.training.weights.weight_sets import open_weights

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
    """Save two states as a.pt and b.pt, and compare."""
    monkeypatch.chdir(tmp_path)

    def run(a: State, b: State) -> WeightsReport:
        torch.save(a, "a.pt")
        torch.save(b, "b.pt")
        return weights(["a.pt", "b.pt"], tmp_path / "out", device="cpu", overwrite=True)

    return run


def answer(result: WeightsReport) -> str:
    return "\n".join(result.summary.answer)


def matters(result: WeightsReport, what: str) -> list[tuple[str, str | None]]:
    return [(r.source, r.tensor) for r in result.remarks if r.what == what]


def test_equal_weights_are_said_to_be_equal(compare: Compare) -> None:
    """Every element equal: one sentence, and no remark."""
    result = compare(state(), state())
    assert (
        answer(result)
        == "b.pt equals a.pt: every finite element of the 4 tensors compared (456)."
    )
    assert result.remarks == ()
    assert result.totals[0].identical == 4


def test_weights_in_bfloat16_are_set_beside_a_coarser_cast(compare: Compare) -> None:
    """Where the first is stored in bfloat16 a cast to it changes nothing; the yardstick
    is the first coarser format. Where there is none, that is said."""
    first = {k: x.bfloat16() for k, x in state().items()}
    assert compare(first, state(1)).totals[0].yardstick == "float8_e4m3fn"
    result = compare({k: x.to(torch.float8_e4m3fn) for k, x in state().items()}, state(1))
    assert result.totals[0].yardstick is None
    assert "is coarser than how a.pt is stored" in answer(result)


def test_tensors_of_zeros_are_not_equal(compare: Compare) -> None:
    """0 in both, they say nothing, and are counted apart; 0 in one is a difference."""
    more = {"a.bias": torch.zeros(8), "b.bias": torch.zeros(8)}
    result = compare(state(0, **more), state(1, **more | {"b.bias": torch.ones(8)}))
    assert (result.totals[0].identical, result.totals[0].zeros) == (1, 1)
    assert "1 of 5 tensors are equal, and 1 more are 0 in both." in answer(result)
    assert [row.tensor for row in result.rows if row.zero] == ["a.bias"]
    assert [row.equal for row in result.rows if row.zero] == [None]
    assert result.totals[0].equal == 8 / 464  # the norm, of all elements but the 8 zeros
    same = compare(state(0, **more), state(0, **more))
    assert same.totals[0].equal == 1.0
    assert answer(same) == (
        "b.pt equals a.pt: every finite element of the 4 tensors compared, and 2 "
        "more are 0 in "
        "both."
    )
    assert answer(compare(more, more)) == (
        "b.pt and a.pt: all 2 tensors are 0 in both, so nothing is compared."
    )


@pytest.mark.parametrize(
    ("elements", "least", "most"), [(4_000, 15, 40), (1_000_000, 0.7, 2.0)]
)
def test_w1_of_two_seeds_is_set_beside_a_cast(
    compare: Compare, elements: int, least: float, most: float
) -> None:
    """Two draws of N(0, 0.02): many casts in a small tensor, about one in a million
    values. The sentence has the quotient: W1 over that of a cast, which is its mean
    change."""
    a, b = normal(elements, seed=1), normal(elements, seed=2)
    result = compare({"w": a}, {"w": b})
    cast = (a.bfloat16().double() - a.double()).abs().mean()
    quotient = wasserstein_distance(a.double().numpy(), b.double().numpy()) / float(cast)
    assert least < quotient < most
    assert (
        f"of the mean difference and {ratio(quotient)}× that of one cast to bfloat16. "
        in answer(result)
    )
    assert "takes two seeds for one cast" not in answer(result)


def test_missing_extra_and_reshaped_tensors_are_named(compare: Compare) -> None:
    """By the set they are the matter of; the rest is compared."""
    other = state(1, more=torch.zeros(2)) | {NAMES[0]: torch.zeros(4, 16)}
    del other["model.norm.weight"]
    result = compare(state(), other)
    assert matters(result, "missing") == [("b.pt", "model.norm.weight")]
    assert matters(result, "extra") == [("b.pt", "more")]
    assert matters(result, "reshaped") == [("b.pt", NAMES[0])]
    assert "is [4, 16], and [8, 8] in a.pt" in answer(result)
    assert len(result.rows) == 2
    assert result.damage == ()


def test_nan_weights_are_counted_and_the_rest_is_compared(compare: Compare) -> None:
    """NaN in one tensor spoils no number, is no equality, and is said."""
    other = state()
    other[NAMES[1]][3, :2] = float("nan")
    result = compare(state(), other)
    assert "has 2 NaN or infinite elements of 128" in answer(result)
    assert result.totals[0].identical == 3
    assert all(row.mean_abs == 0 for row in result.rows)


def test_what_a_pickle_holds_that_is_no_array_is_named(compare: Compare) -> None:
    """Sparse, nested, without values, complex; and a shape that the stored bytes are not
    enough for, which would take forever to compare. The rest is compared, and nothing is
    a bug."""
    odd = {
        "sparse": torch.eye(2).to_sparse(),
        "empty": torch.empty(3, device="meta"),
        "complex": torch.ones(2, dtype=torch.complex64),
        "vast": torch.zeros(1).expand(10**6, 10**6),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }
    result = compare(state(0, **odd), state(1, **odd))
    assert {row.tensor for row in result.rows} == {*state()}
    named = {r.tensor: r.words for r in result.remarks if r.what == "not compared"}
    assert named.keys() == odd.keys()
    assert named["vast"] == "has 1000000000000 elements of which only 1 are stored"


def test_a_difference_beyond_float64_is_not_zero(compare: Compare) -> None:
    """Two ends of float64's range are not said to be equal, nor to hold no element."""
    ends = [
        {"w": torch.full((4,), sign * 1.7e308, dtype=torch.float64)}
        for sign in (1.0, -1.0)
    ]
    result = compare(*ends)
    [row] = result.rows
    assert (row.max_abs, row.mean_abs, row.equal) == (None, None, 0.0)
    assert row.nulls["mean_abs"] == "is beyond what float64 holds"
    assert "not known (is beyond what float64 holds)" in answer(result)


def test_a_tied_head(compare: Compare) -> None:
    """A pickle that shares storage has it under both names; a set that leaves it out
    lacks it."""
    tied = {HEAD: state(1)[EMBEDDING], **state(1)}
    tied[EMBEDDING] = tied[HEAD]
    for result in (compare(state(), tied), compare(tied, state())):
        assert len(result.rows) == 4
        assert matters(result, "missing") == matters(result, "extra") == []
    result = compare(state(), state(**{HEAD: state()[EMBEDDING] + 0.5}))
    assert matters(result, "extra") == [("b.pt", HEAD)]


@pytest.fixture
def run(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> Callable[..., tuple[int, str, str]]:
    """`numdev weights ARGUMENTS -o out` in a directory with a.pt, b.pt and c.pt: code,
    output."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("a.pt", "b.pt", "c.pt")):
        torch.save(state(seed), name)

    return lambda *arguments: ran(capsys, "weights", *arguments, "-o", "out")


def test_damage_is_exit_code_3_after_the_report(run: Any, tmp_path: Path) -> None:
    """A truncated shard: the rest is reported, one line names it, and none of it is
    missing."""
    for name, seed in (("x", 0), ("y", 1)):
        sharded(tmp_path / name, state(seed))
    path = tmp_path / "y" / "model-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 4)
    code, out, err = run("x", "y")
    assert code == 3
    assert "differs from" in out
    assert f"{path.name}: is not a whole safetensors file" in err.splitlines()[-1]
    result = report.read(Path("out"))
    assert len(result.rows) == 2
    assert [r.what for r in result.remarks] == ["damaged"]


def test_errors_are_one_line(run: Any) -> None:
    """And nothing else: no report is left where nothing was compared."""
    torch.save({"x": torch.ones(2)}, "others.pt")
    Path("broken.pt").write_bytes(b"nothing")
    for name in ("empty.safetensors", "bare.safetensors"):
        save_file({}, name)
    for names, code, words in (
        (
            "empty.safetensors bare.safetensors",
            3,
            "no tensor could be compared: the files hold no tensor\n",
        ),
        ("a.pt", 2, "expected two sets or more"),
        ("a.pt nowhere.pt", 2, "no such file or directory"),
        ("a.pt b.pt b.pt", 2, "given twice"),
        ("a.pt broken.pt", 3, "broken.pt: is damaged or holds Python objects"),
        (
            "a.pt others.pt",
            3,
            "no tensor could be compared: others.pt: model.embed_tokens",
        ),
    ):
        result, out, err = run(*names.split())
        assert (result, out, unstarted(err).count("\n")) == (code, "", 1)
        assert words in err
        assert not Path("out/report.json").exists()


def test_another_request_is_refused(run: Any) -> None:
    """The same one replaces its report; another needs --overwrite."""
    assert run("a.pt", "b.pt")[0] == run("a.pt", "b.pt")[0] == 0
    code, _, err = run("a.pt", "c.pt")
    assert code == 2
    assert "holds the report of a different numdev weights" in err
    assert run("a.pt", "c.pt", "--overwrite")[0] == 0


@pytest.mark.gpu
def test_on_a_gpu_the_numbers_are_the_same(run: Any, tmp_path: Path) -> None:
    """CPU and GPU add up in other orders (n u of 256 terms) and agree in all else."""
    by_cpu, by_gpu = (
        weights(["a.pt", "b.pt"], tmp_path / d, device=d) for d in ("cpu", "cuda")
    )
    for one, other in zip(by_cpu.rows, by_gpu.rows, strict=True):
        for name, value in one.model_dump().items():
            wanted = (
                pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
            )
            assert getattr(other, name) == wanted, (one.tensor, name)


RELATIVE = 1e-12
"""Sums of 10^4 fp64 terms, in whichever order: n u = 10^4 * 1.1e-16."""


def normal(*shape: int, seed: int, size: float = 0.02) -> Tensor:
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def measured(of: Tensor, against: Tensor) -> dict[str, Any]:
    return row_numbers(compared(of, against, cast_costs(against)))


def expected(of: Tensor, against: Tensor) -> dict[str, float]:
    """The same by numpy and scipy, from the values."""
    a, b = (x.double().flatten().numpy() for x in (of, against))
    cast = b.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    differs = (a != 0) | (b != 0)  # here the only zeros are of a tensor that is 0 in both
    return {
        "max_abs": np.abs(a - b).max(), "mean_abs": np.abs(a - b).mean(),
        "rel": np.linalg.norm(a - b) / np.linalg.norm(b),
        "equal": (a == b)[differs].mean(), "w1": wasserstein_distance(a, b),
        # W1 of a cast is its mean change, since rounding keeps the order.
        "bfloat16_times": np.abs(a - b).mean() / wasserstein_distance(cast, b),
    }  # fmt: skip


def agree(result: dict[str, Any], wanted: dict[str, float]) -> bool:
    return all(math.isclose(result[k], v, rel_tol=RELATIVE) for k, v in wanted.items())


def test_a_group_is_its_tensors_laid_end_to_end() -> None:
    """Every paired number of several tensors is that of their concatenation by numpy and
    scipy, W1 of a cast among them; W1 is the mean of theirs, which is never below W1 of
    the concatenation. The comparison rejects a number that is off by 1e-9."""
    pairs = [
        (normal(40, n, seed=n), normal(40, n, seed=n + 1, size=0.1)) for n in (3, 50, 77)
    ]
    pairs[0][0][:9] = pairs[0][1][:9]
    pairs.append((torch.zeros(7), torch.zeros(7)))
    result = row_numbers(
        pool_sums([compared(a, b, cast_costs(b)) for a, b in pairs]), "mean_w1"
    )
    a, b = (torch.cat([p[i].flatten() for p in pairs]) for i in (0, 1))
    wanted = expected(a, b)
    of_all = wanted.pop("w1")
    assert agree(result, wanted)
    for name in wanted:
        assert not agree(result | {name: result[name] * (1 + 1e-9)}, wanted)
    assert result["nulls"] == {}
    each = [wasserstein_distance(*(t.flatten().numpy() for t in pair)) for pair in pairs]
    mean = np.average(each, weights=[x.numel() for x, _ in pairs])
    # Scipy adds float32 up in float32
    assert result["mean_w1"] == pytest.approx(mean, rel=1e-6)
    assert result["mean_w1"] >= of_all


def test_formats_of_8_bits_and_of_64() -> None:
    """Weights stored in float8 and float64 are compared like any."""
    b = normal(30, 30, seed=6, size=1.0)
    result = measured(b.to(torch.float8_e4m3fn), b.double())
    assert (
        result["max_abs"] == (b.to(torch.float8_e4m3fn).double() - b.double()).abs().max()
    )
    assert result["float8_e4m3fn_times"] == pytest.approx(1, rel=RELATIVE)
    nulls = measured(b, b.to(torch.float8_e4m3fn))["nulls"]
    assert nulls.keys() == {"float8_e4m3fn_times", *(f"{name}_times" for name in CASTS)}


KINDS_OF = {
    "embedding": "transformer.wte.weight patch_embed.proj.weight",
    "attention": "transformer.h.3.attn.c_attn.weight blocks.11.attn.qkv.weight "
    "encoder.layers.0.self_attn.in_proj_weight model.layers.10.self_attn.q_proj.weight "
    "layers.0.attention.wk.weight bert.encoder.layer.1.attention.output.dense.weight "
    "encoder.block.0.layer.0.SelfAttention.o.weight",
    "mlp": "transformer.h.3.mlp.c_proj.weight "
    "model.layers.10.mlp.experts.7.down_proj.weight "
    "layers.0.feed_forward.w2.weight bert.encoder.layer.1.output.dense.weight "
    "blocks.11.mlp.fc1.weight decoder.block.0.layer.2.DenseReluDense.wo.weight",
    "norm": "transformer.h.3.ln_1.weight model.layers.10.self_attn.k_norm.weight "
    "bert.embeddings.LayerNorm.weight vit.encoder.layer.0.layernorm_before.weight",
    "other": "model.layers.0.self_attn.rotary_emb.inv_freq 0.weight",
    "head": (
        "lm_head.weight output.weight cls.predictions.transform.dense.weight head.weight"
    ),
}
"""Names of GPT-2, Llama, BERT, ViT, timm, T5 and PyTorch's Transformer."""


@pytest.mark.parametrize("kind", KINDS_OF)
def test_kinds_by_common_names(kind: str) -> None:
    assert kind in KINDS
    assert {kind_by_name(name) for name in KINDS_OF[kind].split()} == {kind}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_counted_and_left_out(bad: float) -> None:
    """NaN and infinity are counted for their side; the numbers are those of the finite
    pairs."""
    a, b = normal(50, seed=4), normal(50, seed=5)
    clean = measured(a[3:], b[3:])
    a[0] = a[1] = b[1] = b[2] = bad
    result = measured(a, b)
    assert (result["nonfinite_of"], result["nonfinite_against"], result["elements"]) == (
        2,
        2,
        50,
    )
    assert all(
        result[k] == clean[k] for k in ("max_abs", "mean_abs", "rel", "w1", "equal")
    )


STATE = {
    "layers.0.w": torch.arange(12, dtype=torch.float32).view(4, 3),
    "layers.0.b": torch.arange(4).to(torch.bfloat16),
    "scale": torch.tensor(2.5, dtype=torch.float64),
}
NESTED = {"model": {f"_orig_mod.module.{k}": x for k, x in STATE.items()}, "step": 3}
OPTIMISER = {"optim": {"x": torch.ones(3)}, "step": 1}
# As PyTorch's tutorial saves it, of a model in DistributedDataParallel.
APP = {"app": {"model": {f"module.{k}": x for k, x in STATE.items()}, **OPTIMISER}}


def values(path: Path | str) -> dict[str, Tensor]:
    """Everything in a set of weights."""
    return {
        name: stored.read() for name, stored in open_weights(str(path)).tensors.items()
    }


def same(result: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return result.keys() == wanted.keys() and all(
        result[k].dtype == x.dtype and torch.equal(result[k], x)
        for k, x in wanted.items()
    )


def test_every_kind_of_file_gives_its_tensors(tmp_path: Path) -> None:
    """Names, formats and values are those that were saved, without wrappers' prefixes;
    and the comparison rejects another value, format or name."""
    (tmp_path / "lone").mkdir()
    save_file(STATE, tmp_path / "m.safetensors")
    save_file(STATE, tmp_path / "lone" / "adapter_model.safetensors")
    torch.save(STATE, tmp_path / "m.pt")
    torch.save(STATE, tmp_path / "m.bin", _use_new_zipfile_serialization=False)
    torch.save(NESTED, tmp_path / "m.pth")
    index = sharded(tmp_path / "sharded", STATE)
    for path in (
        *(
            tmp_path / name
            for name in ("m.safetensors", "lone", "m.pt", "m.bin", "m.pth")
        ),
        *(index, index.parent),
        distributed(tmp_path / "d", dict(STATE)),
        distributed(tmp_path / "n", {"model": dict(STATE), **OPTIMISER}),
        distributed(tmp_path / "app", APP),
    ):
        assert same(values(path), STATE), path
    scale = STATE["scale"]
    for other in (
        {"scale": scale + 1e-9},
        {"scale": scale.float()},
        {"more": torch.zeros(1)},
    ):
        assert not same(STATE, STATE | other)


def test_tied_weights_of_a_pickle_once(tmp_path: Path) -> None:
    """What shares its storage is listed once, and found under all its names."""
    x = torch.randn(3, 2)
    torch.save(
        {"head": x, "other": x.clone(), "embed": x, "view": x[:2]}, tmp_path / "t.pt"
    )
    result = open_weights(str(tmp_path / "t.pt"))
    assert list(result.tensors) == ["head", "other", "view"]
    assert result.tied == {"embed": "head"}
    assert result.find("embed") is result.tensors["head"]
    assert torch.equal(result.tensors["head"].read(), x)
    assert result.find("none") is None


WHOLE = torch.arange(35, dtype=torch.float32).view(7, 5)
QUARTERS = [
    (rows, at) for rows in (slice(0, 4), slice(4, 7)) for at in (slice(0, 2), slice(2, 5))
]


def pieces(directory: Path, blocks: list[tuple[slice, ...]] = QUARTERS) -> Path:
    """A distributed checkpoint of WHOLE as `w`, in blocks, one file each, as several
    ranks write it. Torch's own classes make its metadata."""
    directory.mkdir()
    chunks, storage = [], {}
    for rank, block in enumerate(blocks):
        part, stream = WHOLE[block].clone(), io.BytesIO()
        torch.save(part, stream)
        name, before = f"__{rank}_0.distcp", b"another tensor"
        (directory / name).write_bytes(before + stream.getvalue())
        offset = torch.Size([s.start for s in block])
        chunks.append(torchs.ChunkStorageMetadata(offset, part.shape))
        place = _StorageInfo(name, len(before), len(stream.getvalue()))
        storage[torchs.MetadataIndex("w", offset)] = place
    kind = torchs.TensorProperties.create_from_tensor(WHOLE)
    about = torchs.TensorStorageMetadata(kind, WHOLE.shape, chunks)
    written = torchs.Metadata(
        {"w": about}, planner_data={"w": ("w",)}, storage_data=storage
    )
    (directory / ".metadata").write_bytes(pickle.dumps(written))
    return directory


@pytest.mark.filterwarnings("ignore")  # of a single process
def test_pieces_are_put_together(tmp_path: Path) -> None:
    """A tensor in four blocks is what torch's own reader makes of the same files."""
    directory = pieces(tmp_path / "d")
    theirs = {"w": torch.zeros(7, 5)}
    dcp.load(theirs, checkpoint_id=directory)
    assert same(values(directory), theirs)
    assert same(theirs, {"w": WHOLE})


@pytest.mark.parametrize("spoil", [
    lambda content, other: content[:-1], lambda content, other: b"x" * len(content),
    lambda content, other: other.ljust(len(content), b"\0"), None,
], ids=["truncated", "garbled", "another block", "gone"])  # fmt: skip
def test_a_damaged_piece_is_named(spoil: Any, tmp_path: Path) -> None:
    """A tensor one of whose files is spoiled raises, with the tensor's name and the
    file's."""
    directory = pieces(tmp_path / "d")
    file, other = directory / "__0_0.distcp", directory / "__3_0.distcp"
    if spoil is None:
        file.unlink()
    else:
        file.write_bytes(spoil(file.read_bytes(), other.read_bytes()))
    with pytest.raises(MeasurementError, match=r"w: __0_0.distcp is missing or damaged"):
        values(directory)


@pytest.mark.parametrize("blocks", [QUARTERS[:3], [*QUARTERS[:3], QUARTERS[0]]])
def test_pieces_that_leave_a_gap_are_refused(blocks: Any, tmp_path: Path) -> None:
    """No number is made of memory that no file filled: a block less, and one twice."""
    with pytest.raises(MeasurementError, match="do not make up the tensor"):
        values(pieces(tmp_path / "d", blocks))


@pytest.mark.parametrize("content", [
    Calls(os.mkdir, "ran"), {"state_dict_metadata": Calls(os.system, "touch ran")},
    Calls(torch.load, "x"), torch.nn.Linear(2, 2),
])  # fmt: skip
def test_metadata_that_calls_is_refused(
    content: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    """A pickle that would call or build anything is refused by its name, and nothing
    runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(
        MeasurementError, match=r"asks for .*, which is not part of a checkpoint"
    ):
        read_metadata(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [".metadata"]


def test_metadata_changes_none_of_torchs_classes(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Writing into a class reaches only a stand-in; plain pickle would have changed
    torch's."""
    monkeypatch.setattr(torchs.Metadata, "version", None)
    # Push the class, then the state (None, {"version": "spoilt"}); BUILD sets attributes
    # by it.
    spoils = (
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(Vversion\nVspoilt\ndtb."
    )
    (tmp_path / ".metadata").write_bytes(spoils)
    with pytest.raises(MeasurementError, match="is not the metadata"):
        read_metadata(tmp_path)
    assert torchs.Metadata.version is None
    pickle.loads(spoils)
    assert torchs.Metadata.version == "spoilt"


def test_metadata_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    """A file outside the checkpoint's directory is never opened."""
    path = pieces(tmp_path / "d") / ".metadata"
    written = pickle.loads(path.read_bytes())
    for place in written.storage_data.values():
        place.relative_path = "../" + place.relative_path
    path.write_bytes(pickle.dumps(written))
    with pytest.raises(MeasurementError, match="not the name of a file beside it"):
        read_metadata(path.parent)
