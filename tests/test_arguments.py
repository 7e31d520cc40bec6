"""What a model takes besides text: read from a file, or drawn where nobody gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from numdev.errors import MeasurementError, NumdevError, UsageError
from numdev.sources.prompts import Prompt, draw, read, shifted, wanted


class Plain(nn.Module):
    """No model of transformers: what it needs has no default."""

    def forward(self, idx: Tensor, targets: Tensor | None = None, **more: Any) -> Tensor:
        return idx


def file(directory: Path, **tensors: Tensor) -> Path:
    save_file(tensors, directory / "in.safetensors")
    return directory / "in.safetensors"


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("llama", ["input_ids"]),
        ("bert", ["input_ids"]),
        ("t5", ["input_ids"]),
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
        ("vit", "pixel_values", (3, 3, 12, 12), "3 images of 3 x 12 x 12 drawn with seed 5"),
        ("clip", "pixel_values", (3, 3, 12, 12), "3 images of 3 x 12 x 12 drawn with seed 5"),
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


@pytest.mark.parametrize(
    ("model", "name"),
    [(models.wav2vec2, "input_values"), (Plain, "idx"), (models.llama, "pixel_values")],
)
def test_what_cannot_be_drawn_is_named(model: Any, name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}, which numdev cannot draw .*--inputs"):
        draw(name, model(), count=1, length=1, seed=0)


def test_the_decoder_reads_the_text_shifted() -> None:
    """The start token first, and the mask along with it."""
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    text = Prompt(
        inputs={"input_ids": ids, "attention_mask": (ids > 0).long()}, description="2 texts"
    )
    read_too = shifted(text, models.t5_seq2seq())
    assert read_too.inputs["decoder_input_ids"].tolist() == [[0, 5, 6], [0, 8, 9]]
    assert read_too.inputs["decoder_attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert read_too.description == "the same shifted right for the decoder"
    assert shifted(text, models.bart()).inputs["decoder_input_ids"][0, 0] == 2
    unnamed = models.t5_seq2seq()  # as T5's own configuration has it
    del unnamed.config.decoder_start_token_id
    assert shifted(text, unnamed).inputs["decoder_input_ids"][0, 0] == 0


def test_a_file_gives_the_arguments_it_names(tmp_path: Path) -> None:
    given = {"pixel_values": torch.randn(2, 3, 12, 12), "input_ids": torch.ones(2, 4).long()}
    prompt = read(file(tmp_path, **given), models.clip())
    assert prompt.inputs.keys() == given.keys()
    assert all(torch.equal(prompt.inputs[n], x) for n, x in given.items())
    assert prompt.description == "input_ids and pixel_values of in.safetensors"


def refused(path: Path, kind: type[NumdevError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        read(path, models.vit())
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    for word in (path.name, *words):
        assert word in str(caught.value)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    """Each in one line that names the file and what is wrong."""
    refused(tmp_path / "none.safetensors", UsageError, "no such file")
    whole = file(tmp_path, pixel_values=torch.zeros(1, 3, 12, 12))
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole.read_bytes()[:-8])
    refused(cut, MeasurementError, "not a whole safetensors file")
    (tmp_path / "text.safetensors").write_text("not tensors at all")
    refused(tmp_path / "text.safetensors", MeasurementError, "not a whole safetensors file")
    refused(file(tmp_path), UsageError, "holds no tensor")
    refused(
        file(tmp_path, pixel_value=torch.zeros(1)), UsageError, "'pixel_value'", "'pixel_values'"
    )
    refused(file(tmp_path, kwargs=torch.zeros(1)), UsageError, "'kwargs'")
    refused(file(tmp_path, pixel_values=torch.tensor(1.0)), UsageError, "shape []")
    refused(file(tmp_path, pixel_values=torch.zeros(0, 3, 12, 12)), UsageError, "[0, 3, 12, 12]")
