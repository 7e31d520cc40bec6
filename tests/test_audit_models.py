"""`numdev audit` of models of other kinds or that write, and what a model is given to
read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from commands import refusal
from commands import run as main_code
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from numdev import report
from numdev.cli.main import main
from numdev.gate.judging import judge_report
from numdev.request_models import AuditRequest
from numdev.sources.capture import capture
from numdev.sources.checkpoint import open_checkpoint
from numdev.sources.prompts import (
    draw_input,
    model_inputs,
    needed_inputs,
    prompt_from_text,
)
from numdev.studies.audit.kind import TAKE_SINKS
from numdev.studies.audit.view import maps

SMALL = ("--kernel", "sdpa-math", "--sequences", "2", "--length", "6", "--device", "cpu")


def audit(capsys: Any, target: Path, *flags: str) -> tuple[report.AuditReport, str]:
    """The report of an audit, and what the terminal shows of it."""
    output = target.parent / f"out{len(list(target.parent.iterdir()))}"
    main(["audit", str(target), *SMALL, *flags, "--output", str(output)])
    return report.read(output), capsys.readouterr().out


def kernel_rows(result: report.AuditReport) -> list[report.DeviationRow]:
    rows = [r for r in result.rows if r.role == "kernel" and r.tensor == "out"]
    assert all(r.status == "ok" and r.floor_ratio for r in rows)
    return rows


def layers(result: Any) -> list[str]:
    """Of its first map, in order."""
    return [line.cells[0].text for line in next(maps(result)).rows]


def test_an_encoder_decoder_model(tmp_path: Path, capsys: Any) -> None:
    """Its three attentions are rows of their own in the map, under its layer and what it
    is."""
    result, shown = audit(capsys, models.saved("t5_seq2seq", tmp_path))
    assert len(kernel_rows(result)) == 6 * 4
    names = layers(result)
    assert len(names) == len(set(names)) == 6
    assert sum("encoder" in n and "SelfAttention" in n for n in names) == 2
    assert sum("decoder" in n and "EncDecAttention" in n for n in names) == 2
    assert "EncDecAttention" in shown
    assert {c.mask for c in result.cases} == {"additive"}
    assert "the same for the decoder" in result.provenance.source["prompt"]


def test_sinks_that_no_kernel_takes_are_told_of_with_those_that_do(
    tmp_path: Path, capsys: Any
) -> None:
    """On the first page; a kernel that takes them is judged, and nothing said."""
    target = models.saved("gpt_oss", tmp_path)
    assert main_code("audit", target, *SMALL, "-o", tmp_path / "o") == 3
    assert TAKE_SINKS in " ".join(capsys.readouterr().out.split())
    result = report.read(tmp_path / "o")
    assert result.tested == (TAKE_SINKS,)
    judge_report(result)
    result, _ = audit(capsys, target, "--kernel", "emulated")
    assert TAKE_SINKS not in result.tested


def test_layers_without_a_softmax_are_on_the_first_page(
    tmp_path: Path, capsys: Any
) -> None:
    result, shown = audit(capsys, models.saved("minimax", tmp_path))
    words = "layer 0 (MiniMaxLightningAttention): no softmax attention"
    assert result.provenance.source["not_audited"] == words
    assert f"Not audited: {words}." in shown
    assert {row.layer for row in kernel_rows(result)} == {1}
    judge_report(result)


def test_images_from_a_file(tmp_path: Path, capsys: Any) -> None:
    """The tensors given are what the model reads, as many as there are; the rest is
    drawn."""
    target = models.saved("clip", tmp_path)
    passed = tmp_path / "cats.safetensors"
    save_file({"pixel_values": torch.rand(3, 3, 12, 12)}, passed)
    result, _ = audit(capsys, target, "--inputs", str(passed))
    prompt = "pixel_values of cats.safetensors, 3 x 6 random token ids, seed 0"
    assert result.provenance.source["prompt"] == prompt
    assert {c.batch for c in result.cases} == {3}
    assert result.request["inputs"] == str(passed)
    save_file({"pixel_values": torch.rand(3, 3, 12, 12)}, passed)
    other, _ = audit(capsys, target, "--inputs", str(passed))
    digests = [r.provenance.source["prompt_sha256"] for r in (result, other)]
    assert digests[0] != digests[1]


def test_a_model_that_writes(tmp_path: Path, capsys: Any) -> None:
    """Prefill and decode are told apart in rows, cases and the map."""
    result, shown = audit(capsys, models.saved("llama", tmp_path), "--generate", "2")
    rows = kernel_rows(result)
    assert [sum(r.phase == p for r in rows) for p in ("prefill", "decode")] == [16, 32]
    assert [(c.q_len, c.kv_len) for c in result.cases] == [(6, 6)] * 2 + [(1, 7)] * 2 + [
        (1, 8)
    ] * 2
    assert layers(result) == ["0 prefill", "1 prefill", "0 decode", "1 decode"]
    assert "0 decode" in shown
    assert result.request["generate"] == 2
    csv = next(tmp_path.glob("out*/rows.csv")).read_text().splitlines()
    assert "phase" in csv[0].split(",")


@pytest.mark.parametrize(
    ("name", "generate", "length"), [("gpt2", 60, 4), ("t5_seq2seq", 60, 99)]
)
def test_what_is_written_fits_after_what_is_read(
    name: str, generate: int, length: int, tmp_path: Path
) -> None:
    """A model of 64 positions that writes 60 tokens reads 4; an encoder is not so
    limited."""
    checkpoint = open_checkpoint(models.saved(name, tmp_path))
    model = checkpoint.load_model(dtype=torch.float32, device="cpu")
    how: dict[str, Any] = {"length": 99, "sequences": 1, "generate": generate}
    request = AuditRequest(target="", checkpoint="x", kernels=(), **how)
    prompt = model_inputs(request, checkpoint, model)
    assert prompt.inputs["input_ids"].shape == (1, length)
    capture(model, prompt.inputs, lambda case: None, source="", generate=generate)


@pytest.mark.parametrize(("name", "flags", "words"), [
    ("vit", ("--generate", "1"), "ViTForImageClassification does not generate text"),
    ("vit", ("--text", "a.txt"), "ViTForImageClassification reads no text"),
    ("wav2vec2", (), "reads input_values, which numdev cannot make"),
    ("vit", ("--inputs", "none.safetensors"), "none.safetensors: no such file"),
    ("gpt2", ("--generate", "64"), "expected < 64 (the model's positions)"),
])  # fmt: skip
def test_requests_that_cannot_be_met(
    name: str, flags: tuple[str, ...], words: str, tmp_path: Path, capsys: Any
) -> None:
    """In one line, before anything is measured."""
    assert words in refusal(capsys, 2, models.saved(name, tmp_path), *SMALL, *flags)


def test_what_is_not_finite_in_a_model_is_in_the_report(
    tmp_path: Path, capsys: Any
) -> None:
    """The weight as it is stored, the inputs of the layer that it spoils, and elements
    that only float16 cannot hold, which are no fault of the weights."""
    target = models.saved("llama", tmp_path)
    weights = load_file(target / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.weight"][0, 0] = torch.nan
    weights["model.layers.0.self_attn.v_proj.weight"] *= 1e8
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    result, _ = audit(capsys, target, "--format", "float16", "--format", "bfloat16")
    source = result.provenance.source
    assert source["nonfinite_weights"] == {"model.layers.1.self_attn.q_proj.weight": 1}
    first, second = result.cases
    assert first.nonfinite == {}
    assert first.overflows.keys() == {"float16"}
    assert second.nonfinite.keys() == {"q"}
    assert (
        0
        < second.nonfinite["q"]
        <= second.batch * second.heads * second.q_len * second.head_dim
    )
    sound, _ = audit(capsys, models.saved("gpt2", tmp_path))
    assert sound.provenance.source["nonfinite_weights"] == {}
    assert not any(case.nonfinite or case.overflows for case in sound.cases)


PAD, CLS, SEP, UNKNOWN = range(4)
IMAGES = "3 images of 3 x 12 x 12, random, seed 5"


def tokenizer(*, special: bool = False, **options: Any) -> PreTrainedTokenizerFast:
    """Words w0, w1, ... are the ids 10, 11, ...; with `special`, [CLS] and [SEP] around a
    text."""
    vocab = {"[PAD]": PAD, "[CLS]": CLS, "[SEP]": SEP, "[UNK]": UNKNOWN}
    vocab |= {f"w{i}": 10 + i for i in range(100)}
    words = Tokenizer(WordLevel(vocab, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if special:
        words.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", **options)


def text(directory: Path, name: str, words: range) -> Path:
    path = directory / name
    path.write_text(" ".join(f"w{i}" for i in words), encoding="utf-8")
    return path


def test_every_chunk_carries_the_special_tokens(tmp_path: Path) -> None:
    """They count for the length."""
    file = text(tmp_path, "a.txt", range(6))
    prompt = prompt_from_text([file], tokenizer(special=True), length=4, sequences=8)
    assert prompt.inputs["input_ids"].dtype == torch.int64
    assert prompt.inputs["input_ids"].tolist() == [
        [CLS, 10 + i, 11 + i, SEP] for i in (0, 2, 4)
    ]


class CutsNothing(PreTrainedTokenizerFast):
    """As in some versions of transformers: a single chunk, whatever is asked for."""

    def __call__(
        self, *args: Any, return_overflowing_tokens: bool = False, **how: Any
    ) -> Any:
        if not return_overflowing_tokens:
            return super().__call__(*args, **how)
        encoded = super().__call__(*args, **how)
        return {name: [x] for name, x in encoded.items()}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("words", "length"), [(6, 4), (7, 4), (40, 17), (3, 16), (1, 3)])
def test_a_text_is_cut_whatever_the_tokenizer_cuts(
    special: bool, words: int, length: int, tmp_path: Path
) -> None:
    """Whole chunks one after another; of a text that fills none, all its tokens."""
    file, around = text(tmp_path, "a", range(words)), 2 * special
    reads = tokenizer(special=special)
    reads = CutsNothing(tokenizer_object=reads.backend_tokenizer, unk_token="[UNK]")
    prompt = prompt_from_text([file], reads, length=length, sequences=8)
    ids, step = list(range(10, 10 + words)), length - around
    whole = [ids[at : at + step] for at in range(0, words - step + 1, step)][:8] or [ids]
    expected = [[CLS, *chunk, SEP] if special else chunk for chunk in whole]
    assert prompt.inputs["input_ids"].tolist() == expected
    assert prompt.counts() == {
        "sequences_asked": 8,
        "sequences_read": len(expected),
        "tokens_asked": length,
        "tokens_read": len(expected[0]),
    }


def test_a_tokenizer_written_in_python_is_read_too(tmp_path: Path) -> None:
    """ByT5's: a byte is its value + 3, and </s> is 1."""
    file = tmp_path / "a.txt"
    file.write_text("abcde", encoding="utf-8")
    prompt = prompt_from_text([file], ByT5Tokenizer(), length=3, sequences=8)
    assert prompt.inputs["input_ids"].tolist() == [[100, 101, 1], [102, 103, 1]]


def test_a_short_text_is_less_than_was_asked_for(tmp_path: Path, capsys: Any) -> None:
    """The report has both numbers: of a text, of random tokens, of a model's positions,
    and of what is padded."""
    words = text(tmp_path, "w.txt", range(2))
    padded = tmp_path / "padded.safetensors"
    ids, mask = torch.ones(2, 6, dtype=torch.int64), torch.ones(2, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    save_file({"input_ids": ids, "attention_mask": mask}, padded)
    reading = models.saved("gpt2", tmp_path)
    tokenizer().save_pretrained(reading)
    table = {
        ("--text", str(words)): (2, 1, 6, 2),
        (): (2, 2, 6, 6),
        ("--length", "99"): (2, 2, 64, 64),
        ("--inputs", str(padded)): (2, 2, 4, 4),
    }
    for flags, counts in table.items():
        result, _ = audit(capsys, reading, *flags)
        source = result.provenance.source
        names = (
            f"{what}_{how}"
            for what in ("sequences", "tokens")
            for how in ("asked", "read")
        )
        assert tuple(source.get(name) for name in names) == counts, flags


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [None, "[PAD]"])
def test_a_shorter_file_is_padded_on_the_tokenizers_side(
    tmp_path: Path, side: str, pad: str | None
) -> None:
    files = [text(tmp_path, "a", range(4)), text(tmp_path, "b", range(2))]
    reads = tokenizer(special=True, padding_side=side, pad_token=pad)
    prompt = prompt_from_text(files, reads, length=6, sequences=2)
    short, fill = [CLS, 10, 11, SEP], [PAD, PAD]
    ids, mask = (prompt.inputs[n][1].tolist() for n in ("input_ids", "attention_mask"))
    assert ids == (fill + short if side == "left" else short + fill)
    assert mask == ([0, 0, 1, 1, 1, 1] if side == "left" else [1, 1, 1, 1, 0, 0])
    assert prompt.description == "2 x up to 6 tokens of a, b"
    assert (prompt.counts()["tokens_asked"], prompt.counts()["tokens_read"]) == (6, 4)


@pytest.mark.parametrize(("name", "argument", "shape", "words"), [
    *[(n, "pixel_values", (3, 3, 12, 12), IMAGES) for n in ("vit", "clip")],
    ("whisper", "input_features", (3, 8, 24), "3 spectrograms of 8 x 24, random, seed 5"),
])  # fmt: skip
def test_images_and_spectrograms_have_the_configs_size(
    name: str, argument: str, shape: tuple[int, ...], words: str
) -> None:
    """Drawn from N(0, 1) with the seed, without touching torch's own generator."""
    model = getattr(models, name)()
    assert argument in needed_inputs(model)
    state = torch.get_rng_state()
    prompt, same, other = (
        draw_input(argument, model, count=3, length=9, seed=s) for s in (5, 5, 6)
    )
    assert prompt.inputs[argument].shape == shape
    assert prompt.description == words
    x, again, another = (p.inputs[argument] for p in (prompt, same, other))
    assert torch.equal(x, again)
    assert not torch.equal(x, another)
    # 1000 values and more: the mean is within 4 standard errors of 0 and the variance
    # near 1.
    assert abs(x.mean()) < 4 / x.numel() ** 0.5
    assert abs(x.var() - 1) < 4 * (2 / x.numel()) ** 0.5
    assert torch.equal(torch.get_rng_state(), state)
