"""The text that networks learn, as token ids.

A batch is a function of a seed and the number of its step, and of nothing else: there is
no position in the data to be saved, and every device sees the same batches."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from numdev import temporary_files
from numdev.errors import MeasurementError, UsageError
from numdev.sources.prompts import read_text
from numdev.studies.training.config import DataConfig, ModelConfig

# Third-party code, tests, programs bundled with Python, and tables written by other
# programs.
EXCLUDED_FOLDERS = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test"),
    *("idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"),
}
# Spelled so that no text contains them by chance, as "<s>" might be.
BOS, EOS = "<|bos|>", "<|eos|>"
BOS_ID, EOS_ID = 0, 1


def seed_for(*parts: object) -> int:
    """Returns a seed of 56 bits for random numbers of one purpose, which `parts`, words
    and numbers, name in order: the same for the same parts on every machine."""
    named = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(named[:7], "big")


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """One long row of token ids on the device, longer than a window, from which windows
    are drawn."""

    ids: Tensor
    vocabulary: int
    count: int  # windows in a batch
    context: int
    # Of transformers, saved with a checkpoint; None for bytes
    tokenizer: Any
    about: Mapping[str, str]  # the text in words, and the hash of its ids

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """Returns `inputs` and `targets`, int64 [count, context] each, of windows drawn
        anywhere in the ids: the same for the same seed and step on every device.
        `targets` are `inputs` one token further. With a trained tokenizer each input
        begins with the token BOS_ID, as every prompt will."""
        generator = torch.Generator().manual_seed(seed_for("batch", seed, step))
        width, device = self.context + (self.tokenizer is None), self.ids.device
        positions = len(self.ids) - width + 1
        starts = torch.randint(positions, (self.count, 1), generator=generator)
        window = self.ids[starts.to(device) + torch.arange(width, device=device)].long()
        if self.tokenizer is None:
            return {"inputs": window[:, :-1], "targets": window[:, 1:]}
        first = torch.full_like(window[:, :1], BOS_ID)
        return {"inputs": torch.cat([first, window[:, :-1]], dim=1), "targets": window}


def load_tokens(
    config: DataConfig, model: ModelConfig, count: int, device: torch.device
) -> Tokens:
    """Returns the text of a configuration as tokens on the device, in batches of `count`
    windows. With the tokenizer `bytes` texts are joined by two newlines; with `bpe` a
    tokenizer is trained on them, and each text ends with EOS_ID. Raises UsageError for a
    file that cannot be read, and for a text of no more tokens than a window;
    MeasurementError where the trained tokenizer loads as another."""
    texts = (
        stdlib_texts()
        if config.source == "stdlib"
        else [read_text(Path(f)) for f in config.files]
    )
    if config.tokenizer == "bpe":
        tokenizer, loaded = _train_tokenizer(
            texts, config.vocabulary or 2048, model.context
        )
        # verbose=False: texts longer than the context are meant here, no slip worth a
        # warning.
        rows = loaded(texts, add_special_tokens=False, verbose=False)["input_ids"]
        ids = torch.tensor([i for row in rows for i in (*row, EOS_ID)], dtype=torch.int32)
        vocabulary, unit = len(loaded), "tokens"
    else:
        whole = b"\n\n".join(text.encode() for text in texts)
        ids, tokenizer = torch.from_numpy(np.frombuffer(whole, np.uint8).copy()), None
        vocabulary, unit = 256, "bytes"
    names = ", ".join(Path(file).name for file in config.files)
    source = names or "the Python standard library"
    if len(ids) <= model.context:
        raise UsageError(
            f"{source}: expected more than model.context ({model.context}) tokens, "
            f"got {len(ids)}"
        )
    about = {
        "prompt": f"{len(ids):,} {unit} of {source}",
        "data_sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
    }
    return Tokens(
        ids=ids.to(device),
        vocabulary=vocabulary,
        count=count,
        context=model.context,
        tokenizer=tokenizer,
        about=about,
    )


def stdlib_texts() -> list[str]:
    """Returns the texts of the standard library's .py files, sorted by path. Left out are
    blank files, files that are not UTF-8, tests and what is bundled (folders of
    EXCLUDED_FOLDERS), and files whose name begins with `_sysconfigdata`. Raises OSError
    where a file cannot be read."""
    paths = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        # Not entered: site-packages may hold ten thousands of files.
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        # _sysconfigdata_*.py records the machine that built this Python.
        paths += [
            Path(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    texts = []
    for path in sorted(paths):
        with suppress(UnicodeDecodeError):
            texts.append(path.read_text(encoding="utf-8"))
    return [text for text in texts if text.strip()]


def _train_tokenizer(texts: list[str], vocabulary: int, context: int) -> tuple[Any, Any]:
    """Returns a byte-level BPE tokenizer trained on the texts, and the same tokenizer
    saved and loaded. Text is to be encoded by the latter, so that the network sees the
    ids that a user of its checkpoint will get. `texts`: at least one; `vocabulary`: how
    many tokens at most; `context`: the longest length that the tokenizer states. Raises
    MeasurementError where the loaded tokenizer encodes or decodes the first text
    otherwise than the trained one."""
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    trained: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    with temporary_files.temporary_folder() as folder:
        # AutoTokenizer chooses a class by the files it finds; for a Llama configuration
        # some choices rebuild the tokenizer with SentencePiece's rules: ids, but of
        # another text.
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config))
        trained.save_pretrained(folder)
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = loaded(texts[0], verbose=False)["input_ids"]
    same = ids == trained(texts[0], verbose=False)["input_ids"]
    if ids[:1] != [BOS_ID] or not same or loaded.decode(ids[1:]) != texts[0]:
        raise MeasurementError("the saved tokenizer does not load as it was trained")
    return trained, loaded
