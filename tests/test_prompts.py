"""What a model is given to read: whole chunks with their special tokens, or drawn ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from numdev.errors import UsageError
from numdev.sources.checkpoint import load_tokenizer
from numdev.sources.prompts import drawn, from_text

PAD, CLS, SEP, UNKNOWN = range(4)


def tokenizer(*, special: bool = False, **options: Any) -> PreTrainedTokenizerFast:
    """Words w0, w1, ... are the ids 10, 11, ...; with `special`, [CLS] and [SEP] around a text."""
    vocab = {"[PAD]": PAD, "[CLS]": CLS, "[SEP]": SEP, "[UNK]": UNKNOWN}
    vocab.update({word: 4 + i for i, word in enumerate("abcdef")})
    vocab.update({f"w{i}": 10 + i for i in range(100)})
    words = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if special:
        words.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", **options)


def text(directory: Path, name: str, words: range) -> Path:
    path = directory / name
    path.write_text(" ".join(f"w{i}" for i in words), encoding="utf-8")
    return path


def rows(prompt: Any) -> list[list[int]]:
    assert prompt.inputs["input_ids"].dtype == torch.int64
    return prompt.inputs["input_ids"].tolist()


def test_text_is_cut_into_whole_chunks(tmp_path: Path) -> None:
    """Ten words make three chunks of three; the word left over is not used; nothing is padded."""
    file = text(tmp_path, "a.txt", range(10))
    prompt = from_text([file], tokenizer(), length=3, sequences=8)
    assert rows(prompt) == [[10, 11, 12], [13, 14, 15], [16, 17, 18]]
    assert prompt.inputs.keys() == {"input_ids"}
    assert prompt.description == "3 x 3 tokens of a.txt"


def test_every_chunk_carries_the_special_tokens(tmp_path: Path) -> None:
    """They count for the length."""
    file = text(tmp_path, "a.txt", range(6))
    prompt = from_text([file], tokenizer(special=True), length=4, sequences=8)
    assert rows(prompt) == [[CLS, 10 + i, 11 + i, SEP] for i in (0, 2, 4)]


def test_files_take_turns(tmp_path: Path) -> None:
    """Chunks are drawn evenly; a file that has run out leaves its turns to the others."""
    files = [text(tmp_path, "a", range(8)), text(tmp_path, "b", range(20, 23))]
    prompt = from_text(files, tokenizer(), length=2, sequences=4)
    assert [row[0] for row in rows(prompt)] == [10, 30, 12, 14]
    assert prompt.description == "4 x 2 tokens of a and b"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [None, "[PAD]"])
def test_a_shorter_file_is_padded_on_the_tokenizers_side(
    tmp_path: Path, side: str, pad: str | None
) -> None:
    files = [text(tmp_path, "a", range(4)), text(tmp_path, "b", range(2))]
    reads = tokenizer(special=True, padding_side=side, pad_token=pad)
    prompt = from_text(files, reads, length=6, sequences=2)
    short, fill = [CLS, 10, 11, SEP], [PAD, PAD]
    assert rows(prompt)[1] == (fill + short if side == "left" else short + fill)
    mask = prompt.inputs["attention_mask"].tolist()
    assert mask == [[1] * 6, [0, 0, 1, 1, 1, 1] if side == "left" else [1, 1, 1, 1, 0, 0]]
    assert prompt.description == "2 x up to 6 tokens of a and b"


def test_the_demo_reads_its_own_prompt() -> None:
    """Eight sequences of 256 tokens, as statistics over sequences need, each with its first token.

    And they say what the file says.
    """
    demo = Path(__file__).parent.parent / "numdev" / "data" / "demo"
    reads = load_tokenizer(demo)
    prompt = from_text([demo / "prompt.txt"], reads, length=256, sequences=8)
    assert prompt.description == "8 x 256 tokens of prompt.txt"
    assert {row[0] for row in rows(prompt)} == {reads.bos_token_id}
    said = "".join(reads.decode(row[1:]) for row in rows(prompt))
    assert (demo / "prompt.txt").read_text(encoding="utf-8").startswith(said)


def test_drawn_ids_follow_the_seed() -> None:
    """Repeatable, within the vocabulary, and the whole of it."""
    prompt = drawn(7, length=50, sequences=4, seed=3)
    ids = prompt.inputs["input_ids"]
    assert ids.shape == (4, 50)
    assert set(ids.flatten().tolist()) == set(range(7))
    assert prompt.description == "4 x 50 token ids drawn with seed 3"
    state = torch.get_rng_state()
    assert prompt.digest == drawn(7, length=50, sequences=4, seed=3).digest
    assert prompt.digest != drawn(7, length=50, sequences=4, seed=4).digest
    assert torch.equal(torch.get_rng_state(), state)


# --- what is wrong ------------------------------------------------------------------------------


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no\.txt: cannot be read"):
        from_text([tmp_path / "no.txt"], tokenizer(), length=4, sequences=1)


@pytest.mark.parametrize("content", ["", " \n"])
def test_a_file_without_tokens(tmp_path: Path, content: str) -> None:
    """Also among files that have some: every file contributes."""
    (tmp_path / "b.txt").write_text(content)
    files = [text(tmp_path, "a.txt", range(4)), tmp_path / "b.txt"]
    with pytest.raises(UsageError, match=r"b\.txt: holds no token"):
        from_text(files, tokenizer(), length=4, sequences=2)
