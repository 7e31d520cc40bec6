"""What a model is given to read: whole chunks of text with their special tokens, drawn ids, and
what it takes besides: read from a file, or drawn where nobody gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from numdev.sources.prompts import draw, from_text, wanted

PAD, CLS, SEP, UNKNOWN = range(4)
IMAGES = "3 images of 3 x 12 x 12 drawn with seed 5"


def tokenizer(*, special: bool = False, **options: Any) -> PreTrainedTokenizerFast:
    """Words w0, w1, ... are the ids 10, 11, ...; with `special`, [CLS] and [SEP] around a text."""
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
    prompt = from_text([file], tokenizer(special=True), length=4, sequences=8)
    assert prompt.inputs["input_ids"].dtype == torch.int64
    assert prompt.inputs["input_ids"].tolist() == [[CLS, 10 + i, 11 + i, SEP] for i in (0, 2, 4)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [None, "[PAD]"])
def test_a_shorter_file_is_padded_on_the_tokenizers_side(
    tmp_path: Path, side: str, pad: str | None
) -> None:
    files = [text(tmp_path, "a", range(4)), text(tmp_path, "b", range(2))]
    reads = tokenizer(special=True, padding_side=side, pad_token=pad)
    prompt = from_text(files, reads, length=6, sequences=2)
    short, fill = [CLS, 10, 11, SEP], [PAD, PAD]
    ids, mask = (prompt.inputs[n][1].tolist() for n in ("input_ids", "attention_mask"))
    assert ids == (fill + short if side == "left" else short + fill)
    assert mask == ([0, 0, 1, 1, 1, 1] if side == "left" else [1, 1, 1, 1, 0, 0])
    assert prompt.description == "2 x up to 6 tokens of a and b"


# --- the other arguments of a model --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        *[(name, ["input_ids"]) for name in ("llama", "bert", "t5")],
        ("t5_seq2seq", ["input_ids", "decoder_input_ids"]),
        ("vit", ["pixel_values"]),
        ("clip", ["input_ids", "pixel_values"]),
        ("whisper", ["input_features", "decoder_input_ids"]),
        ("wav2vec2", ["input_values"]),
    ],
)
def test_what_a_model_needs(name: str, needs: list[str]) -> None:
    assert wanted(getattr(models, name)()) == needs


@pytest.mark.parametrize(
    ("name", "argument", "shape", "words"),
    [
        *[(n, "pixel_values", (3, 3, 12, 12), IMAGES) for n in ("vit", "clip")],
        ("whisper", "input_features", (3, 8, 24), "3 spectrograms of 8 x 24 drawn with seed 5"),
    ],
)
def test_images_and_spectrograms_have_the_configs_size(
    name: str, argument: str, shape: tuple[int, ...], words: str
) -> None:
    """Drawn from N(0, 1) with the seed, without touching torch's own generator."""
    model = getattr(models, name)()
    state = torch.get_rng_state()
    prompt, same, other = (draw(argument, model, count=3, length=9, seed=s) for s in (5, 5, 6))
    assert prompt.inputs[argument].shape == shape
    assert prompt.description == words
    assert prompt.digest == same.digest != other.digest
    # 1000 values and more: the mean is within 4 standard errors of 0 and the variance near 1.
    x = prompt.inputs[argument]
    assert abs(x.mean()) < 4 / x.numel() ** 0.5
    assert abs(x.var() - 1) < 4 * (2 / x.numel()) ** 0.5
    assert torch.equal(torch.get_rng_state(), state)
