"""Files of log-probabilities in every layout that numdev reads: the arrays that went in
come out, whatever padding, fillings and response-only arrays stood between."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from logprob_files import (
    Sample,
    flat,
    rectangles,
    samples,
    write_chat,
    write_completions,
    write_lines,
    write_nemo_rl,
    write_parquet,
    write_plain,
    write_prime_rl,
    write_prompt_logprobs,
    write_safetensors,
    write_sglang,
    write_slime,
    write_slime_rollout,
)

from numdev.errors import MeasurementError, UsageError
from numdev.studies.logprobs.readers import read_sides
from numdev.studies.logprobs.records import RecordedSequence, RecordedSettings


def holds(
    sequence: RecordedSequence, sample: Sample, side: str, *, prompt: bool = True
) -> bool:
    """Whether a sequence is a sample as one side has it, with NaN for its prompt."""
    values = getattr(sample, side)
    before = np.full(len(sample.prompt) if prompt else 0, np.nan)
    ids = sample.ids if prompt else sample.response
    n = len(ids)
    return (
        np.array_equal(sequence.token_ids, ids)
        and np.array_equal(sequence.mask, sample.mask[-n:])
        and np.array_equal(sequence.logprobs[sequence.mask], values)
        and np.isnan(sequence.logprobs[: len(before)]).all()
        and sequence.token_ids.dtype == np.int64
        and sequence.logprobs.dtype == np.float64
    )


BOTH = {
    "plain": lambda path, some: write_plain(path / "both.jsonl", some),
    "prime-rl": lambda path, some: write_prime_rl(path / "step_7", some),
    "nemo-rl": lambda path, some: write_nemo_rl(path / "train_data_step3.jsonl", some),
    "slime": lambda path, some: write_slime(path / "x_3.pt", some),
}
LAYOUTS = {
    "plain": "numdev",
    "prime-rl": "prime-rl token export",
    "nemo-rl": "NeMo-RL train data",
    "slime": "slime debug dump",
}


@pytest.mark.parametrize("name", BOTH)
def test_a_file_of_both_sides_gives_their_arrays(tmp_path: Path, name: str) -> None:
    """What a trainer wrote of both sides is two sides, the rollout first, with the values
    of the response's tokens; fillings and padding are no values."""
    some = samples(6)
    rollout, trainer = read_sides(BOTH[name](tmp_path, some))
    assert (rollout.name, trainer.name) == ("rollout", "trainer")
    assert rollout.layout == LAYOUTS[name]
    order = [0, 2, 4, 1, 3, 5] if name == "prime-rl" else range(6)  # rank by rank
    for a, b, number in zip(rollout.sequences, trainer.sequences, order, strict=True):
        sample = some[number]
        if name == "nemo-rl" and number % 3 == 2:  # a sample that does not count
            assert not a.mask.any()
            assert np.array_equal(a.logprobs[-len(sample.rollout) :], sample.rollout)
            continue
        whole = name in ("prime-rl", "nemo-rl")  # zeros for the prompt, beyond the first
        for side, sequence in (("rollout", a), ("trainer", b)):
            assert np.array_equal(sequence.token_ids, sample.ids)
            assert np.array_equal(sequence.mask, sample.mask)
            assert np.array_equal(sequence.logprobs[sequence.mask], getattr(sample, side))
            before = sequence.logprobs[~sequence.mask]
            assert math.isnan(before[0])
            assert (before[1:] == 0).all() if whole else np.isnan(before).all()


ONE = {
    "jsonl": lambda path, some: write_plain(path / "a.jsonl", some, "rollout"),
    "gz": lambda path, some: write_plain(path / "a.jsonl.gz", some, "rollout"),
    "zst": lambda path, some: write_plain(path / "a.jsonl.zst", some, "rollout"),
    "parquet": lambda path, some: write_parquet(path / "a.parquet", some, "rollout"),
    "rectangles": lambda path, some: write_safetensors(
        path / "a.safetensors", rectangles(some, "rollout")
    ),
    "flat": lambda path, some: write_safetensors(
        path / "a.safetensors", flat(some, "rollout")
    ),
    "saved": lambda path, some: saved(path / "a.pt", rectangles(some, "rollout")),
    "saved-list": lambda path, some: saved(
        path / "a.pt",
        [
            {"token_ids": s.ids, "mask": s.mask, "logprobs": s.whole("rollout")}
            for s in some
        ],
    ),
    "completions": lambda path, some: write_completions(path / "a.jsonl", some),
    "chat": lambda path, some: write_chat(path / "a.jsonl", some),
    "sglang": lambda path, some: write_sglang(path / "a.json", some),
}
NEEDS = {"zst": "backports.zstd", "parquet": "pyarrow"}


def saved(path: Path, value: object) -> Path:
    """A file of torch.save."""
    torch.save(value, path)
    return path


@pytest.mark.parametrize("name", ONE)
def test_a_file_of_one_side_gives_its_arrays(tmp_path: Path, name: str) -> None:
    """One side's file is a side of the file's name."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    some = samples(5, seed=1)
    (side,) = read_sides(ONE[name](tmp_path, some))
    assert side.name == "a"
    assert len(side.sequences) == 5
    for sequence, sample in zip(side.sequences, some, strict=True):
        if name == "sglang":  # it has values of the prompt
            assert np.array_equal(sequence.logprobs[sequence.mask], sample.rollout)
            assert np.array_equal(sequence.token_ids, sample.ids)
            assert sequence.logprobs[1 : len(sample.prompt)].tolist() == [-1.5] * (
                len(sample.prompt) - 1
            )
        else:
            assert holds(sequence, sample, "rollout")
        assert sequence.has_prompt


@pytest.mark.parametrize(
    "write",
    [
        lambda path, some: write_completions(path, some, ids=False),
        lambda path, some: write_sglang(path, some, prompts=False),
    ],
)
def test_a_response_without_its_prompt_says_so(tmp_path: Path, write) -> None:
    """Without the prompt's ids nothing can compute the truth: the sequence says it."""
    some = samples(3)
    (side,) = read_sides(write(tmp_path / "a.json", some))
    assert side.notes == ("3 of 3 sequences have no prompt.",)
    for sequence, sample in zip(side.sequences, some, strict=True):
        assert not sequence.has_prompt
        assert holds(sequence, sample, "rollout", prompt=False)


@pytest.mark.parametrize(
    "write", [write_completions, write_chat, write_sglang, write_plain]
)
def test_alternatives_stand_beside_their_tokens(tmp_path: Path, write) -> None:
    """Ids and values of alternatives are rectangles; a prompt has none."""
    (sample,) = samples(1, k=3)
    sides = read_sides(write(tmp_path / "a.json", [sample]))
    (sequence,) = sides[0].sequences
    p = len(sample.prompt)
    assert sequence.top_ids is not None
    assert sequence.top_logprobs is not None
    assert np.array_equal(sequence.top_ids[p:], sample.top_ids)
    assert np.array_equal(sequence.top_logprobs[p:], sample.top_logprobs)
    assert (sequence.top_ids[:p] == -1).all()
    assert np.isnan(sequence.top_logprobs[:p]).all()


def test_prompt_logprobs_are_values_of_the_prompt(tmp_path: Path) -> None:
    """Where a server scored a prompt and returned nothing of its own answer, the prompt's
    tokens count, and the first has no value."""
    some = samples(3)
    (side,) = read_sides(write_prompt_logprobs(tmp_path / "a.jsonl", some))
    for sequence, sample in zip(side.sequences, some, strict=True):
        assert sequence.token_ids.tolist() == [*sample.ids, 7]
        assert sequence.mask.tolist() == [False, *[True] * (len(sample.ids) - 1), False]
        p = len(sample.prompt)
        assert np.array_equal(sequence.logprobs[p:-1], sample.rollout)
        assert sequence.top_ids is not None
        assert sequence.top_ids[1].tolist() == [sample.ids[1], 1000]


def test_an_echoed_prompt_is_no_response(tmp_path: Path) -> None:
    """With `echo` the values are those of prompt and response; the response counts."""
    (sample,) = samples(1)
    values = [None, *[-2.0] * (len(sample.prompt) - 1), *sample.rollout.tolist()]
    logprobs = {
        "tokens": [f"token_id:{i}" for i in sample.ids],
        "token_logprobs": values,
        "top_logprobs": [None] * len(values),
    }
    choice = {
        "index": 0,
        "prompt_token_ids": sample.prompt.tolist(),
        "logprobs": logprobs,
    }
    path = write_lines(tmp_path / "a.jsonl", [{"id": "x", "choices": [choice]}])
    (sequence,) = read_sides(path)[0].sequences
    assert sequence.token_ids.tolist() == sample.ids
    assert sequence.mask.astype(int).tolist() == sample.mask
    assert sequence.logprobs[1] == -2
    assert np.array_equal(sequence.logprobs[sequence.mask], sample.rollout)


def test_sequences_of_one_record_have_names_of_their_own(tmp_path: Path) -> None:
    """Choices without an index, and rows of one line of NeMo-RL's, go by their number."""
    choice = {"token_ids": [1], "logprobs": {"tokens": ["a"], "token_logprobs": [-1.0]}}
    record = {"id": "x", "choices": [choice, choice, {**choice, "index": 7}]}
    [side] = read_sides(write_lines(tmp_path / "a.jsonl", [record]))
    assert [x.uid for x in side.sequences] == ["x/0", "x/1", "x/7"]
    ids, values = [[1, 2], [3, 4]], [[0.0, -1.0], [0.0, -2.0]]
    for count, names in ((2, ["4/9/0", "4/9/1"]), (1, ["4/9"])):
        line = {"token_ids": ids[:count], "input_lengths": [2] * count, "idx": 9,
                "generation_logprobs": values[:count], "prev_logprobs": values[:count]}  # fmt: skip
        path = write_lines(tmp_path / "train_data_step4.jsonl", [line])
        for side in read_sides(path):
            assert [x.uid for x in side.sequences] == names


def test_a_batch_file_has_the_request_and_the_response(tmp_path: Path) -> None:
    """A line of a batch is unwrapped; the request's settings are the sequence's, and the
    batch's id is its uid, with the choice's number where there are several."""
    token = {"token": "token_id:4", "logprob": -9999.0, "top_logprobs": []}
    choices = [
        {"index": i, "token_ids": [4], "logprobs": {"content": [token]}} for i in range(2)
    ]
    record = {
        "custom_id": "q1",
        "request": {"body": {"temperature": 0.6, "top_p": 0.9, "top_k": 20}},
        "response": {
            "body": {"id": "chat-1", "choices": choices, "prompt_token_ids": [1]}
        },
    }
    (side,) = read_sides(write_lines(tmp_path / "a.jsonl", [record]))
    assert [sequence.uid for sequence in side.sequences] == ["q1/0", "q1/1"]
    expected = RecordedSettings(temperature=0.6, top_p=0.9, top_k=20)
    assert side.sequences[0].settings == expected
    assert side.notes == ("2 of 2 log-probabilities are minus infinity.",)


def test_settings_are_of_the_nearest_that_says_them(tmp_path: Path) -> None:
    """The record before its sampling parameters, these before the request, that before
    its own."""
    choice = {"token_ids": [4], "logprobs": {"tokens": ["x"], "token_logprobs": [-1.0]}}
    record = {
        "dtype": "float32",
        "sampling_params": {"top_p": 0.9, "dtype": "float16"},
        "request": {
            "temperature": 0.7,
            "top_p": 0.8,
            "sampling_params": {"temperature": 0.6, "min_p": 0.1},
        },
        "response": {"choices": [choice]},
    }
    (side,) = read_sides(write_lines(tmp_path / "a.jsonl", [record]))
    expected = RecordedSettings(temperature=0.7, top_p=0.9, min_p=0.1, dtype="float32")
    assert side.sequences[0].settings == expected


def test_slimes_kept_sets_and_experts_reach_their_tokens(tmp_path: Path) -> None:
    """Kept sets begin after the prompt, and the last token has no experts."""
    (sample,) = samples(1)
    rollout, trainer = read_sides(write_slime(tmp_path / "x.pt", [sample]))
    sequence = rollout.sequences[0]
    n, p = len(sample.ids), len(sample.prompt)
    assert sequence.kept_offsets is not None
    assert sequence.kept_ids is not None
    assert sequence.kept_offsets[: p + 1].tolist() == [0] * (p + 1)
    for at in range(p, n):
        start, end = sequence.kept_offsets[at : at + 2]
        assert sequence.kept_ids[start:end].tolist() == [sample.ids[at], 5]
    assert sequence.routed_experts is not None
    assert sequence.routed_experts.shape == (n, 2, 3)
    assert (sequence.routed_experts[-1] == -1).all()
    assert sequence.settings == RecordedSettings(weights_version="4", step=3)
    assert trainer.sequences[0].settings == RecordedSettings(step=3)
    assert trainer.sequences[0].entropy is not None
    assert np.nansum(trainer.sequences[0].entropy) == n - p


def test_several_versions_of_the_weights_are_no_version(tmp_path: Path) -> None:
    """A sample under two versions names neither, and the side says so; what slime took
    out of training does not count."""
    (side,) = read_sides(write_slime_rollout(tmp_path / "x.pt", samples(3)))
    sequence = side.sequences[0]
    assert sequence.weights_versions == ("4", "5")
    assert sequence.settings.weights_version is None
    assert not side.sequences[1].mask.any()
    assert side.notes == (
        "3 of 3 sequences were sampled under several versions of the weights.",
    )


def test_all_fields_of_numdevs_layout_are_read(tmp_path: Path) -> None:
    """Each optional field reaches its place, null is no value, and what is not read is
    told."""
    record = {
        "token_ids": [5, 6, 7],
        "logprobs": [None, -0.5, -math.inf],
        "mask": [0, 1, 1],
        "uid": 17,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": -1,
        "min_p": 0,
        "dtype": "bfloat16",
        "logprobs_mode": "processed_logprobs",
        "engine": "vllm 0.20",
        "weights_version": ["3", "3", "4"],
        "step": 9,
        "kept_ids": [None, [6, 8], [7]],
        "top_ids": [None, [6, 8], [7]],
        "top_logprobs": [None, [-0.5, -1.0], [-0.25]],
        "position_ids": [0, 0, 1],
        "pack_ids": [0, 1, 1],
        "routed_experts": [[[1, 2]], [[3, 4]], [[5, 6]]],
        "entropy": [None, 1.5, 0.25],
        "turn": [0, 1, 1],
        "reward": 1.0,
    }
    (side,) = read_sides(write_lines(tmp_path / "a.jsonl", [record]))
    (sequence,) = side.sequences
    assert sequence.uid == "17"
    assert sequence.settings == RecordedSettings(
        temperature=0.6,
        top_p=0.95,
        top_k=-1,
        min_p=0.0,
        dtype="bfloat16",
        logprobs_mode="processed_logprobs",
        engine="vllm 0.20",
        step=9,
    )
    assert sequence.weights_versions == ("3", "4")
    assert np.isneginf(sequence.logprobs[2])
    assert math.isnan(sequence.logprobs[0])
    arrays = {
        "kept_ids": [6, 8, 7],
        "kept_offsets": [0, 0, 2, 3],
        "top_ids": [[-1, -1], [6, 8], [7, -1]],
        "position_ids": [0, 0, 1],
        "sequence_lengths": [1, 2],
        "routed_experts": [[[1, 2]], [[3, 4]], [[5, 6]]],
        "turn": [0, 1, 1],
    }
    for name, expected in arrays.items():
        assert getattr(sequence, name).tolist() == expected, name
    assert side.notes == (
        "Fields that are not read: reward.",
        "1 of 2 log-probabilities are minus infinity.",
        "1 of 1 sequences were sampled under several versions of the weights.",
    )


def test_positive_values_are_kept_and_told(tmp_path: Path) -> None:
    """A side may have recorded probabilities, which is for the causes to find."""
    record = {"token_ids": [1, 2], "logprobs": [0.5, 0.25]}
    path = write_lines(tmp_path / "a.jsonl", [record])
    (side,) = read_sides(path)
    assert side.sequences[0].logprobs.tolist() == [0.5, 0.25]
    assert side.notes == (
        f"{path} line 1: logprobs[0]: expected at most 0, got 0.5; 2 of 2 are above 0.",
    )


def test_the_text_of_a_response_is_no_wrapped_response(tmp_path: Path) -> None:
    """Many programs keep a response's text beside its tokens."""
    record = {"response": "…", "samples": 2, "token_ids": [1], "logprobs": [-1.0]}
    (side,) = read_sides(write_lines(tmp_path / "x.jsonl", [record]))
    assert side.layout == "numdev"
    assert side.notes == ("Fields that are not read: response, samples.",)


def test_sides_of_one_file_may_be_records_apart(tmp_path: Path) -> None:
    """`side` sorts the records of one file."""
    records = [
        {"side": side, "token_ids": [1], "logprobs": [-1.0]} for side in ("b", "a", "b")
    ]
    a, b = read_sides(write_lines(tmp_path / "x.jsonl", records))
    assert (a.name, len(a.sequences), b.name, len(b.sequences)) == ("a", 1, "b", 2)


def test_settings_of_one_side_are_its_alone(tmp_path: Path) -> None:
    """What both have in common holds where a side says nothing."""
    record = {
        "token_ids": [1],
        "rollout_logprobs": [-1.0],
        "trainer_logprobs": [-1.0],
        "temperature": 0.6,
        "dtype": "float32",
        "rollout_settings": {"dtype": "bfloat16"},
    }
    rollout, trainer = read_sides(write_lines(tmp_path / "x.jsonl", [record]))
    shared = {"temperature": 0.6}
    assert rollout.sequences[0].settings == RecordedSettings(**shared, dtype="bfloat16")
    assert trainer.sequences[0].settings == RecordedSettings(**shared, dtype="float32")


def test_an_unfinished_step_is_refused(tmp_path: Path) -> None:
    """Of prime-rl's folders only steps with their marker are read; the others are told."""
    write_prime_rl(tmp_path / "step_10", samples(2), stable=False)
    with pytest.raises(MeasurementError, match="expected a file STABLE"):
        read_sides(tmp_path)
    write_prime_rl(tmp_path / "step_2", samples(2))
    rollout, _ = read_sides(tmp_path)
    assert len(rollout.sequences) == 2
    assert rollout.notes[0] == "Not read, since they have no file STABLE: step_10."


def test_of_a_folder_what_can_be_read_is_read(tmp_path: Path) -> None:
    """Other files do not hinder it, whatever is in their names; the folder gives its name
    whole."""
    plain, steps = tmp_path / "run.json", tmp_path / "steps"
    plain.mkdir()
    write_plain(plain / "a.jsonl", samples(2))
    write_prime_rl(steps / "step_1", samples(2))
    for other in ("x.pt.gz", "x.jsonl.gz.zst", ".x.jsonl", "x.md"):
        (plain / other).write_bytes(b"\x80")
    for path in steps.rglob("rank_0.jsonl"):
        path.with_name("rank_0.jsonl.bak").write_bytes(b"\x80")
    for path in (plain, steps):
        assert [len(side.sequences) for side in read_sides(path)] == [2, 2]
    write_completions(plain / "a.jsonl", samples(2))
    assert [side.name for side in read_sides(plain)] == ["run.json"]


def test_left_padding_is_cut_by_its_mask(tmp_path: Path) -> None:
    """Rows begin and end where the attention mask does."""
    tensors = {
        "token_ids": torch.tensor([[0, 0, 3, 4], [5, 6, 7, 0]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]),
        "logprobs": torch.tensor(
            [[9.0, 9.0, -1.0, -2.0], [-1.0, -2.0, -3.0, 9.0]]
        ).bfloat16(),
    }
    (side,) = read_sides(write_safetensors(tmp_path / "a.safetensors", tensors))
    assert [s.token_ids.tolist() for s in side.sequences] == [[3, 4], [5, 6, 7]]
    assert [s.logprobs.tolist() for s in side.sequences] == [[-1, -2], [-1, -2, -3]]


def test_a_document_over_many_lines_is_read(tmp_path: Path) -> None:
    """A response that somebody saved with indentation is one document."""
    path = write_completions(tmp_path / "a.jsonl", samples(1))
    document = tmp_path / "b.json"
    document.write_text(json.dumps(json.loads(path.read_text()), indent=2))
    (a,), (b,) = read_sides(path), read_sides(document)
    assert a.sequences[0].token_ids.tolist() == b.sequences[0].token_ids.tolist()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "x.pkl",
            "expected a file .jsonl, .ndjson, .json, .parquet, .safetensors, .pt, .pth",
        ),
        ("missing.jsonl", "no such file"),
        ("x", "got a name without a suffix"),
    ],
)
def test_a_path_of_another_kind_is_a_usage_error(
    tmp_path: Path, name: str, message: str
) -> None:
    """The name tells; nothing is opened to find out."""
    if not name.startswith("missing"):
        (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(UsageError, match=message):
        read_sides(tmp_path / name)


CONTRADICTIONS: dict[str, tuple[dict[str, object], str]] = {
    "value": (
        {"top_ids": [[], [2, 9], [3]], "top_logprobs": [[], [-0.7, -2.0], [-0.251]]},
        "1 tokens have another log-probability among their alternatives.",
    ),
    "probability": (
        {"top_ids": [[], [8, 9], [7]], "top_logprobs": [[], [-0.5, -0.6], [0.5]]},
        "2 tokens have alternatives of more probability than 1.",
    ),
    "filter": (
        {"kept_ids": [[], [8, 9], [3, 7]]},
        "1 tokens have a filter that left other tokens alone (kept_ids).",
    ),
    "positions": (
        {"position_ids": [0, 2, 4]},
        "1 of 1 sequences have position_ids that do not count up by 1 from 0: a model is "
        "asked with such that do.",
    ),
    "positions of a pack": (
        {"position_ids": [0, 1, 2], "seq_lens": [2, 1]},
        "1 of 1 sequences have position_ids that do not count up by 1 from 0: a model is "
        "asked with such that do.",
    ),
}
AGREEING: dict[str, object] = {
    "top_ids": [[], [2, 9], [3]],
    "top_logprobs": [[], [-0.5, -2.0], [-0.251]],
    "kept_ids": [[], [2], [3, 7]],
    "position_ids": [0, 1, 0],
    "seq_lens": [2, 1],
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_a_record_says_twice_and_not_alike(tmp_path: Path, name: str) -> None:
    """Is counted and said, and nothing of a record that agrees with itself."""
    fields, note = CONTRADICTIONS[name]
    path = tmp_path / "a.jsonl"
    record = {"token_ids": [1, 2, 3], "logprobs": [None, -0.5, -0.25]}
    first = "1 of 3 counted tokens have no log-probability."
    path.write_text(json.dumps(record | fields))
    assert read_sides(path)[0].notes == (first, note)
    path.write_text(json.dumps(record | AGREEING))
    assert read_sides(path)[0].notes == (first,)
