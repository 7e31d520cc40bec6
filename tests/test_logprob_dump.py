"""`numdev.dump_logprobs` writes what the readers read, from the arrays that training
programs have; the examples do so by the field names of three of them."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from logprob_files import Sample, samples

import numdev
from numdev.errors import MeasurementError, UsageError
from numdev.studies.logprobs.readers import read_sides
from numdev.studies.logprobs.records import RecordedSettings

EXAMPLES = Path(__file__).parent.parent / "examples" / "logprobs"


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_what_is_written_is_read(tmp_path: Path, suffix: str) -> None:
    """Lists, arrays and tensors; values of the last tokens alone; NaN is no value, minus
    infinity is one; each call appends a sequence."""
    if suffix.endswith("zst"):
        pytest.importorskip("backports.zstd")
    path = tmp_path / f"a.{suffix}"
    numdev.dump_logprobs(path, [1, 2, 3], [-0.5, -math.inf], uid="x", temperature=0.6)
    numdev.dump_logprobs(
        str(path),
        torch.tensor([4, 5]),
        torch.tensor([math.nan, -0.1]).bfloat16(),
        mask=np.array([True, True]),
        top_ids=np.array([[-1], [5]]),
        top_logprobs=np.array([[np.nan], [-0.1]]),
    )
    (side,) = read_sides(path)
    first, second = side.sequences
    assert first.token_ids.tolist() == [1, 2, 3]
    assert np.array_equal(first.logprobs, [np.nan, -0.5, -np.inf], equal_nan=True)
    assert first.mask.tolist() == [False, True, True]
    assert (first.uid, first.settings) == ("x", RecordedSettings(temperature=0.6))
    value = torch.tensor(-0.1).bfloat16().item()
    assert np.array_equal(second.logprobs, [np.nan, value], equal_nan=True)
    assert second.mask.tolist() == [True, True]
    assert second.top_ids is not None
    assert second.top_ids.tolist() == [[-1], [5]]


def test_both_sides_of_one_call(tmp_path: Path) -> None:
    """A token counts where either side has a value, unless a mask says otherwise."""
    path = tmp_path / "a.jsonl"
    numdev.dump_logprobs(
        path, [1, 2, 3], rollout_logprobs=[-1.0], trainer_logprobs=np.float32([-2, -3])
    )
    rollout, trainer = read_sides(path)
    assert rollout.sequences[0].mask.tolist() == [False, True, True]
    assert np.isnan(rollout.sequences[0].logprobs).tolist() == [True, True, False]
    assert trainer.sequences[0].logprobs[1:].tolist() == [-2, -3]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"logprobs": [-1.0], "tempersture": 1},
            UsageError,
            "did you mean 'temperature'",
        ),
        (
            {},
            UsageError,
            "expected logprobs or rollout_logprobs or trainer_logprobs, got 0",
        ),
        ({"logprobs": [0.0] * 3}, UsageError, "logprobs: expected at most 2 values"),
        ({"logprobs": [math.inf]}, MeasurementError, r"logprobs\[1\]: expected a finite"),
        ({"logprobs": [-1], "mask": [0] * 3}, UsageError, "mask: expected at most 2"),
        (
            {"logprobs": [-1], "token_ids": [0.5]},
            MeasurementError,
            "expected whole numbers",
        ),
        (
            {"logprobs": [-1], "temperature": -1},
            MeasurementError,
            "from 0 to 1e\\+06, got -1",
        ),
        (
            {"logprobs": [-1], "path": "x.pt"},
            UsageError,
            "expected a file .jsonl, got .pt",
        ),
        (
            {"logprobs": [-1], "token_ids": 3},
            UsageError,
            "token_ids: expected a list of tokens, got 3",
        ),
        (
            {"logprobs": [-1], "token_ids": torch.tensor(3)},
            UsageError,
            "token_ids: expected a list",
        ),
        (
            {"logprobs": 0.5},
            UsageError,
            "logprobs: expected at most 2 values, one a token, got float",
        ),
        (
            {"logprobs": torch.ones(2, device="meta")},
            UsageError,
            "logprobs: expected values, got Tensor",
        ),
        (
            {"logprobs": [-1], "mask": [[0, 1]]},
            UsageError,
            "mask: expected 0 or 1 .*, got a list of 2",
        ),
        (
            {"logprobs": [-1], "mask": [0, None]},
            UsageError,
            "mask: expected 0 or 1 .*, got null",
        ),
        (
            {"logprobs": [-1], "mask": [0, "1"]},
            UsageError,
            "mask: expected 0 or 1 .*, got '1'",
        ),
        (
            {"logprobs": [-1], "rollout_settings": {"top_k": {3}}},
            UsageError,
            "rollout_settings: expected values that JSON can hold, got TypeError: Object of type set",
        ),
        (
            {"logprobs": [-1], "trainer_settings": {(1, 2): 3}},
            UsageError,
            "trainer_settings: expected",
        ),
        (
            {"logprobs": [-1], "uid": object()},
            UsageError,
            "uid: expected values that JSON can hold",
        ),
        (
            {"logprobs": [-1], "path": "none/a.jsonl"},
            UsageError,
            r"none/a\.jsonl: cannot be written \(No such file or directory\)$",
        ),
        ({"logprobs": [-1], "path": "none/a.jsonl.gz"}, UsageError, "cannot be written"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(
    tmp_path: Path, arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    """One line, before the file is touched."""
    path = tmp_path / str(arguments.pop("path", "a.jsonl"))
    with pytest.raises(error, match=message) as caught:
        numdev.dump_logprobs(path, arguments.pop("token_ids", [1, 2]), **arguments)
    assert "\n" not in str(caught.value)
    assert not path.exists()


def test_what_cannot_be_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of that name stays; without Zstandard there is no file, and so no empty
    one. Tensors in settings are numbers."""
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(
        UsageError, match=r"a\.jsonl: cannot be written \(Is a directory\)"
    ):
        numdev.dump_logprobs(tmp_path / "a.jsonl", [1, 2], logprobs=[-1])
    for module in ("compression", "backports"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=r"needs the package backports\.zstd"):
        numdev.dump_logprobs(tmp_path / "b.jsonl.zst", [1, 2], logprobs=[-1])
    settings = {"top_p": torch.tensor(0.5), "top_k": np.int64(3)}
    numdev.dump_logprobs(
        tmp_path / "c.jsonl", [1, 2], rollout_logprobs=[-1], rollout_settings=settings
    )
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.jsonl", "c.jsonl"]
    written = json.loads((tmp_path / "c.jsonl").read_text())
    assert written["rollout_settings"] == {"top_p": 0.5, "top_k": 3}


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An example as a module, with a class in place of TRL's trainer."""
    trl = ModuleType("trl")
    trl.GRPOTrainer = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trl", trl)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def padded(rows: list[np.ndarray], fill: float, *, left: bool = False) -> torch.Tensor:
    """Rows as a rectangle, padded on one side."""
    width = max(map(len, rows)) + 1
    lines = [[fill] * (width - len(row)) for row in rows]
    pairs = zip(lines, rows, strict=True)
    return torch.tensor([[*a, *b] if left else [*b, *a] for a, b in pairs])


def ones(rows: list[np.ndarray], *, left: bool = False) -> torch.Tensor:
    """The mask of padded rows."""
    return padded([np.ones(len(row)) for row in rows], 0, left=left).long()


def trl_batch(some: list[Sample]) -> dict[str, torch.Tensor]:
    """A batch by TRL's names; the last token of each completion is a tool's."""
    responses = [sample.response for sample in some]
    tools = [np.r_[np.ones(len(row) - 1), 0] for row in responses]
    return {
        "prompt_ids": padded([sample.prompt for sample in some], 0, left=True).long(),
        "prompt_mask": ones([sample.prompt for sample in some], left=True),
        "completion_ids": padded(responses, 0).long(),
        "completion_mask": ones(responses),
        "tool_mask": padded(tools, 1).long(),
        "sampling_per_token_logps": padded([sample.rollout for sample in some], 0),
        "old_per_token_logps": padded([sample.trainer for sample in some], 0),
    }


def verl_batch(some: list[Sample]) -> SimpleNamespace:
    """A DataProto by verl's names; the last token of each response is a tool's."""
    batch = trl_batch(some)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return SimpleNamespace(
        batch={
            "prompts": batch["prompt_ids"],
            "responses": batch["completion_ids"],
            "response_mask": batch["tool_mask"] * batch["completion_mask"],
            "attention_mask": attention,
            "rollout_log_probs": batch["sampling_per_token_logps"],
            "old_log_probs": batch["old_per_token_logps"],
        }
    )


def experience(some: list[Sample], *, left: bool) -> SimpleNamespace:
    """An Experience by OpenRLHF's names: values are one shorter than the sequences, and
    those of a row's first token, after a pad, are no values."""
    rows = [np.array(sample.ids) for sample in some]

    def shorter(side: str) -> torch.Tensor:
        """Values, the first cut off."""
        values = [np.r_[np.full(len(s.prompt), 9.0), getattr(s, side)] for s in some]
        return padded(values, 9.0, left=left)[:, 1:]

    masks = [np.r_[sample.mask[:-1], 0] for sample in some]
    return SimpleNamespace(
        sequences=padded(rows, 0, left=left).long(),
        attention_mask=ones(rows, left=left),
        action_mask=padded(masks, 0, left=left)[:, 1:].long(),
        rollout_log_probs=shorter("rollout"),
        action_log_probs=shorter("trainer"),
    )


RECORD: dict[str, Callable[[ModuleType, list[Sample], str], None]] = {
    "trl_grpo": lambda module, some, path: module.record_batch(
        trl_batch(some), path, step=3
    ),
    "verl_batch": lambda module, some, path: module.record_batch(
        verl_batch(some), path, step=3
    ),
    "openrlhf_experience": lambda module, some, path: module.record_experience(
        experience(some, left=True), path, step=3
    ),
}


@pytest.mark.parametrize("name", [*RECORD, "openrlhf right"])
def test_an_example_records_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Batches by a program's own names, padded as it pads them: tokens, values and masks
    come out as they were; a token of a tool does not count."""
    some = samples(4, seed=2)
    path = str(tmp_path / "a.jsonl")
    if name == "openrlhf right":
        module = example("openrlhf_experience", monkeypatch)
        module.record_experience(experience(some, left=False), path, step=3)
    else:
        RECORD[name](example(name, monkeypatch), some, path)
    rollout, trainer = read_sides(path)
    for a, b, sample in zip(rollout.sequences, trainer.sequences, some, strict=True):
        assert a.token_ids.tolist() == sample.ids
        assert a.mask.astype(int).tolist() == [*sample.mask[:-1], 0]
        r = len(sample.response)
        assert np.array_equal(a.logprobs[-r:], sample.rollout)
        assert np.array_equal(b.logprobs[-r:], sample.trainer)
        assert a.settings.step == 3
