"""What networks learn: text as token ids, token files, and images drawn from a seed.

A batch is a function of a seed and the number of its step, and of nothing else: there is no
position in the data to be saved, and every device sees the same batches.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from numdev.errors import UsageError
from numdev.training.config import DataConfig, ModelConfig
from numdev.training.denoiser import TIMES
from numdev.training.tokenizer import BOS_ID, Tokenizer

# Third-party code, tests, programs bundled with Python, and tables written by other programs.
EXCLUDED_FOLDERS = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test"),
    *("idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"),
}
BETWEEN = b"\n\n"
"""Between two files read as bytes."""
COARSE = 4
"""Into how many cells on a side the random values of an image are drawn."""


def seed_of(*parts: object) -> int:
    """A seed for random numbers of one purpose, from words and numbers that name it."""
    named = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(named[:7], "big")


class Data(Protocol):
    """What is learned, on its device."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    def batch(self, seed: int, step: int) -> dict[str, Tensor]: ...

    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """One long row of token ids, from which windows are drawn."""

    ids: Tensor
    """In a dtype that holds them, on the device."""
    vocabulary: int
    count: int
    """Windows in a batch."""
    context: int
    device: torch.device
    tokenizer: Tokenizer | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """`inputs` and `targets` [count, context], int64: of windows drawn anywhere. A trained
        tokenizer's windows begin with its first token, as every prompt will."""
        made = torch.Generator().manual_seed(seed_of("batch", seed, step))
        width = self.context + (self.tokenizer is None)
        starts = torch.randint(len(self.ids) - width + 1, (self.count, 1), generator=made)
        places = starts.to(self.device) + torch.arange(width, device=self.device)
        window = self.ids[places].long()
        if self.tokenizer is None:
            return {"inputs": window[:, :-1], "targets": window[:, 1:]}
        first = torch.full_like(window[:, :1], BOS_ID)
        return {"inputs": torch.cat([first, window[:, :-1]], dim=1), "targets": window}

    def describe(self) -> dict[str, Any]:
        return dict(self.about)


@dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """Images, of which a batch is made noisy."""

    images: Tensor
    """[images, 1, side, side], float32, of mean 0 and variance 1 each."""
    count: int
    vocabulary: int = 0
    tokenizer: Tokenizer | None = None

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """`images` and `noise` [count, 1, side, side], float32, and `times` [count], int64."""
        made = torch.Generator().manual_seed(seed_of("batch", seed, step))
        chosen = torch.randint(len(self.images), (self.count,), generator=made)
        times = torch.randint(TIMES, (self.count,), generator=made)
        noise = torch.randn(self.count, *self.images.shape[1:], generator=made)
        where = self.images.device
        return {
            "images": self.images[chosen.to(where)],
            "noise": noise.to(where),
            "times": times.to(where),
        }

    def describe(self) -> dict[str, Any]:
        shape = " x ".join(str(n) for n in self.images.shape[2:])
        return {"prompt": f"{len(self.images)} smooth random fields of {shape} pixels"}


def load(config: DataConfig, model: ModelConfig, count: int, device: torch.device) -> Data:
    """The data of a configuration, in batches of `count`. Raises UsageError for a file that cannot
    be read, for data shorter than a window, and for ids beyond the vocabulary."""
    if config.source == "images":
        assert model.image is not None
        return Images(images=fields(config.images, model.image).to(device), count=count)
    assert model.context is not None
    tokenizer = None
    if config.source == "tokens":
        ids, vocabulary = _token_files(config), config.vocabulary or 0
    else:
        texts = stdlib() if config.source == "stdlib" else _text_files(config.files)
        if config.tokenizer == "bpe":
            tokenizer = Tokenizer.trained(texts, config.vocabulary or 2048, model.context)
            ids, vocabulary = tokenizer.encode(texts), tokenizer.size
        else:
            ids, vocabulary = _bytes_of(texts), 256
    if len(ids) <= model.context:
        where = ", ".join(config.files) or config.source
        raise UsageError(
            f"{where}: holds {len(ids)} tokens, and a window takes {model.context + 1}",
            hint="give more data, or a smaller model.context",
        )
    return Tokens(
        ids=ids.to(device), vocabulary=vocabulary, count=count, context=model.context,
        device=device, tokenizer=tokenizer, about=_described(config, ids),
    )  # fmt: skip


def _described(config: DataConfig, ids: Tensor) -> dict[str, Any]:
    """What a report says was learned, and what identifies it."""
    unit = "bytes" if config.source != "tokens" and config.tokenizer == "bytes" else "tokens"
    names = {"stdlib": "the Python standard library"}
    what = names.get(config.source) or ", ".join(Path(f).name for f in config.files)
    return {
        "prompt": f"{len(ids):,} {unit} of {what}",
        "data_sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
    }


def stdlib() -> list[str]:
    """The library's own .py files in UTF-8, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        # _sysconfigdata_*.py records the machine that built this Python.
        if EXCLUDED_FOLDERS.intersection(name.parts) or name.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            texts.append(text)
    return texts


def _text_files(names: tuple[str, ...]) -> list[str]:
    texts = []
    for name in names:
        try:
            texts.append(Path(name).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{name}: cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            why = f"{error.reason} at byte {error.start}"
            raise UsageError(f"{name}: is not UTF-8 text ({why})") from error
    return texts


def _bytes_of(texts: list[str]) -> Tensor:
    whole = BETWEEN.join(text.encode() for text in texts)
    return torch.from_numpy(np.frombuffer(whole, dtype=np.uint8).copy())


def _token_files(config: DataConfig) -> Tensor:
    """The files' ids one after the other, int32."""
    parts = []
    size = np.dtype(config.dtype).itemsize
    for name in config.files:
        try:
            whole = Path(name).read_bytes()
        except OSError as error:
            raise UsageError(f"{name}: cannot be read ({error.strerror})") from error
        if len(whole) % size:
            raise UsageError(
                f"{name}: its {len(whole)} bytes are no {config.dtype} numbers of {size} each",
                hint="is the file whole, and the dtype right?",
            )
        parts.append(np.frombuffer(whole, dtype=config.dtype))
        if len(parts[-1]) and int(parts[-1].max()) >= (config.vocabulary or 0):
            raise UsageError(
                f"{name}: holds the id {parts[-1].max()}, and the vocabulary has "
                f"{config.vocabulary}",
                hint="is the dtype right?",
            )
    return torch.from_numpy(np.concatenate(parts).astype(np.int32))


def fields(count: int, side: int) -> Tensor:
    """Smooth random fields [count, 1, side, side], float32, each of mean 0 and variance 1: a few
    random values, interpolated. The same for everybody."""
    made = torch.Generator().manual_seed(seed_of("images"))
    coarse = torch.randn(count, 1, COARSE, COARSE, generator=made)
    smooth = F.interpolate(coarse, size=(side, side), mode="bicubic", align_corners=True)
    flat = smooth.flatten(1)
    flat = flat - flat.mean(dim=1, keepdim=True)
    return (flat / flat.std(dim=1, keepdim=True)).view_as(smooth)
