"""Bad files of log-probabilities: at least 200, each of which must be refused in one line.

Values of a wrong type, length or range in every field and layout; damaged, cut and
compressed files; files whose content is out of proportion to their size; pickles with
code, which leaves a file `ran` in the folder if anybody runs it."""

from __future__ import annotations

import gzip
import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from logprob_files import (
    Sample,
    samples,
    write_chat,
    write_completions,
    write_nemo_rl,
    write_plain,
    write_prime_rl,
    write_sglang,
    write_slime,
)
from safetensors.torch import save_file

LEAST = 200
HUGE = 10**30
Writer = Callable[[Path], object]
GOOD = {"token_ids": [1, 2, 3], "logprobs": [None, -0.5, -0.25]}


class Code:
    """Runs a command when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        """What an attacker writes."""
        return exec, (f"open({str(self.folder / 'ran')!r}, 'w').close()",)


# By field: values that it cannot have, for a sequence of three tokens
NO_NUMBERS = ["x", {"a": 1}, ["a", "b", "c"], [[1], [2], [3]], 5, True]
BAD_LENGTHS = [[], [0, 0], [0, 0, 0, 0]]
BAD_IDS = [
    [1, 2, x]
    for x in (-1, -100, 2**31, 2**63, 2**64, HUGE, 0.5, 3.0, None, "3", True, [1], {})
]
BAD_FIELDS: dict[str, list[object]] = {
    "token_ids": [*NO_NUMBERS, [], [1], [1, 2], [1, 2, 3, 4], *BAD_IDS],
    "logprobs": [*NO_NUMBERS, *BAD_LENGTHS, [0, 0, "x"], [0, 0, True], [0, 0, HUGE**12], [0, 0, []], [0, 0, 1e101], [0, 0, "NaN"]],
    "mask": [*NO_NUMBERS, *BAD_LENGTHS, [0, 1, 2], [0, 1, 0.5], [0, 1, None], [0, 1, -1], [0, 1, HUGE]],
    "entropy": [*NO_NUMBERS, *BAD_LENGTHS],
    "position_ids": [*BAD_LENGTHS, [0, 1, -2], [0, 1, 2**63], [0, 1, 1.5]],
    "turn": [[0, 1], [0, 0, None]],
    "pack_ids": [[0, 1], "x", [0, 0, 0.5]],
    "sequence_lengths": [[1, 1], [4], [0, 3], [-1, 4], [HUGE]],
    "routed_experts": [[1, 2, 3], [[[1]], [[2]]], [[[1]], [[2]], [[3, 4]]], [[["x"]]] * 3, [[[-2]]] * 3],
    "temperature": [-0.5, "hot", [0.5, 0.6], {"t": 1}, HUGE, HUGE**12, True],
    "top_p": [-1, 0, 1.5, "x"],
    "top_k": [0.5, -2, HUGE, "x"],
    "min_p": [-1, 2, []],
    "logprobs_mode": ["raw_logits", "processed", 5],
    "engine": ["a\x1b[31m", "\ud800", "two\nlines"],
    "uid": [0.5, [1], {}, True],
    "weights_version": [0.5, [0.5], {"v": 1}],
    "step": [-1, 1.5, HUGE],
    "dtype": [["bfloat16"], 0.5, "\0"],
    "rollout_logprobs": [[0]],
}  # fmt: skip
BAD_RECORDS: dict[str, dict[str, object]] = {
    "no values": {"token_ids": [1, 2]},
    "no tokens": {"logprobs": [0.0]},
    "text alone": {"text": "…", "score": 1.0},
    "empty object": {},
    "alternatives without ids": {**GOOD, "top_logprobs": [[], [], []]},
    "ids without values": {**GOOD, "top_ids": [[], [], []]},
    "alternatives too few": {**GOOD, "top_ids": [[]], "top_logprobs": [[]]},
    "alternatives ragged": {**GOOD, "top_ids": [[1], [2], []], "top_logprobs": [[0], [], [0]]},
    "alternatives no lists": {**GOOD, "top_ids": [1, 2, 3], "top_logprobs": [0, 0, 0]},
    "alternatives of text": {**GOOD, "top_ids": [["a"], [], []], "top_logprobs": [[0], [], []]},
    "kept without offsets": {**GOOD, "kept_ids": [1, 2, 3]},
    "offsets without kept": {**GOOD, "kept_offsets": [0, 1, 2, 3]},
    "offsets go down": {**GOOD, "kept_ids": [1, 2], "kept_offsets": [0, 2, 1, 2]},
    "offsets beyond": {**GOOD, "kept_ids": [1, 2], "kept_offsets": [0, 1, 2, 3]},
    "offsets from 1": {**GOOD, "kept_ids": [1, 2], "kept_offsets": [1, 1, 2, 2]},
    "kept too few": {**GOOD, "kept_ids": [[1]]},
    "lengths beyond": {"token_ids": [[1, 2]], "logprobs": [[0, 0]], "lengths": [3]},
    "lengths zero": {"token_ids": [[1, 2]], "logprobs": [[0, 0]], "lengths": [0]},
    "lengths too few": {"token_ids": [[1], [2]], "logprobs": [[0], [0]], "lengths": [1]},
    "offsets of tokens": {"token_ids": [1, 2], "logprobs": [0, 0], "offsets": [0, 3]},
    "offsets repeat": {"token_ids": [1, 2], "logprobs": [0, 0], "offsets": [0, 0, 2]},
    "mask with gaps": {"token_ids": [[1, 2, 3]], "logprobs": [[0, 0, 0]], "attention_mask": [[1, 0, 1]]},
    "mask of nothing": {"token_ids": [[1, 2]], "logprobs": [[0, 0]], "attention_mask": [[0, 0]]},
    "rows of other lengths": {"token_ids": [[1, 2], [3]], "logprobs": [[0, 0], [0, 0]]},
    "settings no object": {"token_ids": [1], "rollout_logprobs": [0], "rollout_settings": 5},
}  # fmt: skip


def _line(value: object) -> Writer:
    """A file of one line of JSON, with infinities as Python writes them."""
    return lambda path: path.write_text(json.dumps(value) + "\n")


def _bytes(content: bytes) -> Writer:
    """A file of these bytes."""
    return lambda path: path.write_bytes(content)


def _saved(value: object) -> Writer:
    """A file of torch.save."""
    return lambda path: torch.save(value, path)


def _tensors(**tensors: torch.Tensor) -> Writer:
    """A safetensors file."""
    return lambda path: save_file(tensors, path)


def _changed(
    write: Callable[[Path, list[Sample]], Path],
    change: Callable[[dict[str, object]], object],
) -> Writer:
    """A file in some layout, of one sample, whose first record is changed."""

    def written(path: Path) -> None:
        """Writes it."""
        write(path, samples(1, k=2))
        text = path.read_text()
        record = json.loads(text if path.suffix == ".json" else text.splitlines()[0])
        first = record[0] if isinstance(record, list) else record
        change(first)
        path.write_text(json.dumps(record))

    return written


def field_files() -> Iterator[tuple[str, Writer]]:
    """A line of numdev's layout with one field that it cannot have."""
    for field, values in BAD_FIELDS.items():
        for number, value in enumerate(values):
            record = {**GOOD, field: value}
            if field == "rollout_logprobs":
                record.pop("logprobs")
            yield f"field {field} {number}.jsonl", _line(record)
    for name, record in BAD_RECORDS.items():
        yield f"record {name}.jsonl", _line(record)


def text_files() -> Iterator[tuple[str, Writer]]:
    """Files that are no lines of JSON objects, or that end early."""
    good = json.dumps(GOOD).encode()
    contents = {
        "empty": b"",
        "blank": b"\n \n\t\n",
        "zeros": bytes(100),
        "random": np.random.default_rng(0).bytes(500),
        "page": b"<!DOCTYPE html><html>404</html>",
        "cut": good + b"\n" + good[:30],
        "cut at once": good[:10],
        "two on a line": good + good,
        "number": b"5\n",
        "null": b"null\n",
        "text": b'"token_ids"\n',
        "list of numbers": b"[1, 2, 3]\n",
        "list of lists": b"[[1], [2]]\n",
        "empty list": b"[]\n",
        "not UTF-8": b'{"token_ids": [1], "logprobs": [0], "uid": "\xff"}\n',
        "deep lists": b'{"token_ids": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
        "deep objects": b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
        "digits": b'{"token_ids": [' + b"9" * 10**5 + b'], "logprobs": [0]}',
        "a float of digits": b'{"token_ids": [1], "logprobs": [1' + b"0" * 400 + b".0]}",
        "infinite": b'{"token_ids": [1], "logprobs": [Infinity]}',
        "too large": b'{"token_ids": [1], "logprobs": [1e999]}',
        "NaN id": b'{"token_ids": [NaN], "logprobs": [0]}',
        "Infinity id": b'{"token_ids": [Infinity], "logprobs": [0]}',
        "single quotes": b"{'token_ids': [1], 'logprobs': [0]}",
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
        "three sides": b"".join(
            json.dumps({**GOOD, "side": side}).encode() + b"\n" for side in "abc"
        ),
    }
    for name, content in contents.items():
        yield f"text {name}.jsonl", _bytes(content)
    yield "document cut.json", _bytes(b"[\n" + good + b",\n")
    yield "document empty.json", _bytes(b"{}")

    def mixed(path: Path) -> None:
        """A response after a plain record."""
        lines = [json.dumps(GOOD), json.dumps({"id": "x", "choices": []})]
        path.write_text("\n".join(lines))

    yield "mixed layouts.jsonl", mixed


def packed_files() -> Iterator[tuple[str, Writer]]:
    """Compressed files that are damaged, cut, or larger than they seem."""
    lines = (json.dumps(GOOD) + "\n").encode() * 2000
    good = gzip.compress(lines)
    yield "packed cut.jsonl.gz", _bytes(good[: len(good) // 2])
    yield "packed no gzip.jsonl.gz", _bytes(lines[:200])
    yield "packed flipped.jsonl.gz", _bytes(good[:-6] + bytes([good[-6] ^ 1]) + good[-5:])
    yield "packed empty.jsonl.gz", _bytes(b"")
    yield "bomb of spaces.jsonl.gz", _bytes(gzip.compress(b" " * 4 * 10**7))
    yield "bomb of lines.jsonl.gz", _bytes(gzip.compress(b"\n" * 10**6))
    zeros = b"0," * 10**7 + b"0"
    bomb = b'{"token_ids":[' + zeros + b'],"logprobs":[' + zeros + b"]}"
    yield "bomb of tokens.jsonl.gz", _bytes(gzip.compress(bomb))
    objects = b'{"choices":[' + b"{}," * (12 * 10**6) + b"{}]}"
    yield "bomb of objects.jsonl.gz", _bytes(gzip.compress(objects))
    same = (json.dumps({"token_ids": [1] * 50, "logprobs": [0] * 50}) + "\n").encode()
    yield "bomb of sequences.jsonl.gz", _bytes(gzip.compress(same * 2 * 10**4))
    try:
        from backports import zstd
    except ImportError:
        return
    good = zstd.compress(lines)
    yield "packed cut.jsonl.zst", _bytes(good[: len(good) // 2])
    yield "packed no zstd.jsonl.zst", _bytes(lines[:200])
    yield (
        "packed flipped.jsonl.zst",
        _bytes(good[:20] + bytes([good[20] ^ 255]) + good[21:]),
    )
    yield "bomb.jsonl.zst", _bytes(zstd.compress(b"[" + b" " * 10**8))


def saved_files(folder: Path) -> Iterator[tuple[str, Writer]]:
    """Files of torch.save and pickle: with code, with objects, with tensors that are no
    arrays, and those that say more than they hold."""
    ids, zeros = torch.tensor([1, 2, 3]), torch.zeros(3)
    good = {"token_ids": ids, "logprobs": zeros}
    code = Code(folder)
    yield "pickle code.pt", _bytes(pickle.dumps(code))
    yield "pickle code in a dict.pt", _bytes(pickle.dumps({**GOOD, "uid": code}))
    yield "pickle protocol 0.pt", _bytes(pickle.dumps(code, protocol=0))
    yield "pickle plain.pth", _bytes(pickle.dumps([GOOD, code]))
    yield "saved code.pt", _saved(code)
    yield "saved code in a dict.pt", _saved({**good, "engine": code})
    yield "saved code in a list.pt", _saved([good, code])
    old = {"_use_new_zipfile_serialization": False}
    yield "saved code, old.pt", lambda path: torch.save(code, path, **old)
    yield "saved module.pt", _saved(torch.nn.Linear(2, 2))
    yield "saved array.pt", _saved({"token_ids": np.arange(3), "logprobs": np.zeros(3)})
    yield "saved path.pt", _saved({**good, "uid": Path("x")})
    for name, value in {
        "none": None,
        "number": 5,
        "text": "token_ids",
        "tensor": ids,
        "empty list": [],
        "list of tensors": [ids, ids],
        "keys of numbers": {1: ids, 2: zeros},
        "expanded": {"token_ids": torch.zeros(1).long().expand(10**9), "logprobs": zeros},
        "expanded half": {
            "token_ids": torch.zeros(1).long().expand(4 * 10**6),
            "logprobs": torch.zeros(1).bfloat16().expand(10**10),
        },
        "expanded rectangle": {
            "token_ids": torch.ones(1, 1).long().expand(10**5, 10**5),
            "logprobs": torch.zeros(1, 1).expand(10**5, 10**5),
        },
        "sparse": {"token_ids": ids, "logprobs": torch.zeros(3).to_sparse()},
        "sparse ids": {"token_ids": ids.to_sparse(), "logprobs": zeros},
        "complex": {"token_ids": ids, "logprobs": zeros.to(torch.complex64)},
        "meta": {"token_ids": ids, "logprobs": torch.zeros(3, device="meta")},
        "nested": {"token_ids": ids, "logprobs": torch.nested.nested_tensor([zeros])},
        "float ids": {"token_ids": ids.float(), "logprobs": zeros},
        "bool ids": {"token_ids": ids.bool(), "logprobs": zeros},
        "scalar ids": {"token_ids": torch.tensor(1), "logprobs": zeros},
        "deep ids": {"token_ids": ids[None, None], "logprobs": zeros[None, None]},
        "negative": {"token_ids": -ids, "logprobs": zeros},
        "infinite": {"token_ids": ids, "logprobs": zeros + torch.inf},
        "short": {"token_ids": ids, "logprobs": zeros[:2]},
        "mask": {**good, "mask": torch.tensor([0, 1, 2])},
        "same list": [{"token_ids": [1] * 999, "logprobs": [0] * 999}] * 10**5,
        "laughs": {"token_ids": laughs(), "logprobs": laughs()},
    }.items():
        yield f"saved {name}.pt", _saved(value)

    def cut(path: Path) -> None:
        """A saved file of which half is there."""
        torch.save(good, path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def deflated(path: Path) -> None:
        """A zip archive with compressed members."""
        torch.save({**good, "logprobs": torch.zeros(10**6)}, path)
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)

    yield "saved cut.pt", cut
    yield "saved compressed.pt", deflated
    yield "saved empty.pt", _bytes(b"")


def laughs() -> list[object]:
    """Lists in lists of the same lists: 10^9 numbers in a few bytes."""
    value: list[object] = [1] * 1000
    for _ in range(2):
        value = [value] * 1000
    return value


def tensor_files() -> Iterator[tuple[str, Writer]]:
    """safetensors files that are damaged or do not fit together."""
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    zeros = torch.zeros(2, 3)
    flat = {"token_ids": ids.reshape(-1), "logprobs": zeros.reshape(-1)}
    for name, tensors in {
        "no values": {"token_ids": ids},
        "other shape": {"token_ids": ids, "logprobs": torch.zeros(2, 2)},
        "other rows": {"token_ids": ids, "logprobs": torch.zeros(3, 3)},
        "lengths beyond": {
            "token_ids": ids,
            "logprobs": zeros,
            "lengths": torch.tensor([3, 4]),
        },
        "lengths negative": {
            "token_ids": ids,
            "logprobs": zeros,
            "lengths": torch.tensor([3, -1]),
        },
        "lengths float": {"token_ids": ids, "logprobs": zeros, "lengths": torch.ones(2)},
        "offsets short": {**flat, "offsets": torch.tensor([0, 3])},
        "offsets down": {**flat, "offsets": torch.tensor([0, 4, 3, 6])},
        "offsets one": {**flat, "offsets": torch.tensor([6])},
        "deep": {"token_ids": ids[None], "logprobs": zeros[None]},
        "float ids": {"token_ids": ids.double(), "logprobs": zeros},
        "large ids": {"token_ids": ids + 2**40, "logprobs": zeros},
        "infinite": {"token_ids": ids, "logprobs": zeros + torch.inf},
        "empty ids": {"token_ids": ids[:, :0], "logprobs": zeros[:, :0]},
        "unknown": {"weight": zeros},
    }.items():
        yield f"tensors {name}.safetensors", _tensors(**tensors)
    yield "tensors empty.safetensors", _bytes(b"")
    yield "tensors header.safetensors", _bytes(struct.pack("<Q", 2**60) + b"{}")
    entry = {"dtype": "I64", "shape": [10**12], "data_offsets": [0, 8 * 10**12]}
    header = json.dumps({"token_ids": entry}).encode()
    yield "tensors too many.safetensors", _bytes(struct.pack("<Q", len(header)) + header)


def response_files() -> Iterator[tuple[str, Writer]]:
    """Responses of serving engines that lack ids, or whose lists do not fit."""

    def in_choice(change: Callable[[dict[str, object]], object]) -> Writer:
        """Completions with a changed choice."""
        return _changed(write_completions, lambda record: change(record["choices"][0]))

    def in_values(name: str, value: object) -> Writer:
        """Completions with other `logprobs`."""
        return in_choice(lambda choice: choice["logprobs"].__setitem__(name, value))

    yield "completions texts.jsonl", in_choice(lambda choice: choice.pop("token_ids"))
    yield "completions ids.jsonl", in_choice(lambda choice: choice["token_ids"].append(1))
    yield (
        "completions id.jsonl",
        in_choice(lambda choice: choice["token_ids"].__setitem__(0, -5)),
    )
    yield (
        "completions none.jsonl",
        in_choice(
            lambda choice: [
                choice.pop(name) for name in ("logprobs", "token_ids", "prompt_token_ids")
            ]
        ),
    )
    yield (
        "completions list.jsonl",
        in_choice(lambda choice: choice.__setitem__("logprobs", [])),
    )
    yield (
        "completions prompt.jsonl",
        in_choice(lambda choice: choice.__setitem__("prompt_logprobs", [None])),
    )
    yield (
        "completions prompt entry.jsonl",
        in_choice(
            lambda choice: choice.update(prompt_token_ids=[1], prompt_logprobs=[5])
        ),
    )
    yield (
        "completions prompt key.jsonl",
        in_choice(
            lambda choice: choice.update(prompt_token_ids=[1], prompt_logprobs=[{"x": 1}])
        ),
    )
    yield (
        "completions prompt without ids.jsonl",
        in_choice(
            lambda choice: choice.update(prompt_token_ids=None, prompt_logprobs=[None])
        ),
    )
    yield "completions values.jsonl", in_values("token_logprobs", ["x"])
    yield "completions no values.jsonl", in_values("token_logprobs", None)
    yield "completions no tokens.jsonl", in_values("tokens", None)
    yield "completions alternatives.jsonl", in_values("top_logprobs", [None])
    yield "completions alternatives no list.jsonl", in_values("top_logprobs", "x")
    for name, choices in {
        "no list": 5,
        "an object": {"0": {}},
        "text": "choice",
        "numbers": [1],
        "empty": [],
        "empty choice": [{}],
    }.items():
        yield f"choices {name}.jsonl", _line({"id": "x", "choices": choices})
    yield "wrapped badly.jsonl", _line({"response": 5})
    yield "wrapped error.jsonl", _line({"response": {"body": {"error": "busy"}}})

    def in_chat(change: Callable[[list[dict[str, object]]], object]) -> Writer:
        """Chat with changed content."""
        return _changed(
            write_chat, lambda record: change(record["choices"][0]["logprobs"]["content"])
        )

    yield "chat text.jsonl", in_chat(lambda content: content[0].update(token="the"))
    yield (
        "chat id.jsonl",
        in_chat(lambda content: content[0].update(token="token_id:99999999999")),
    )
    yield "chat value.jsonl", in_chat(lambda content: content[0].update(logprob="x"))
    yield "chat entry.jsonl", in_chat(lambda content: content.append(7))
    yield (
        "chat alternative.jsonl",
        in_chat(
            lambda content: content[0].update(
                top_logprobs=[{"token": "token_id:1", "logprob": []}]
            )
        ),
    )

    def in_meta(name: str, value: object) -> Writer:
        """SGLang's response with another field of `meta_info`."""
        return _changed(
            write_sglang, lambda record: record["meta_info"].__setitem__(name, value)
        )

    values: dict[str, list[object]] = {
        "output_token_logprobs": [5, [5], [[1]], [[0, 1, 2, 3]], [["x", 1, None]], [[0, -1, None]], [[0, 0.5, None]]],
        "input_token_logprobs": [{}, [None], [[0, "x", None]]],
        "output_top_logprobs": [5, [], [[5]] * 9],
        "weight_version": [0.5],
        "prompt_tokens": [-1, "x"],
    }  # fmt: skip
    for name, several in values.items():
        for number, value in enumerate(several):
            yield f"sglang {name} {number}.json", in_meta(name, value)
    yield "sglang meta.json", _line({"text": "x", "meta_info": 5})
    yield "sglang empty.json", _line({"text": "x", "meta_info": {}})


def trainer_files() -> Iterator[tuple[str, Writer]]:
    """What frameworks write, of another version or cut."""

    def prime(**changes: object) -> Writer:
        """A line of prime-rl's export with changes."""

        def written(path: Path) -> None:
            """Writes it."""
            folder = write_prime_rl(path.parent / "step", samples(1))
            record = json.loads((folder / "rank_0.jsonl").read_text())
            path.write_text(json.dumps(record | changes))

        return written

    yield "prime-rl version.jsonl", prime(schema_version=2)
    yield "prime-rl version text.jsonl", prime(schema_version="one")
    yield "prime-rl values.jsonl", prime(trainer_logprobs=[0.0])
    yield "prime-rl mask.jsonl", prime(loss_mask=[True])
    yield "prime-rl ids.jsonl", prime(token_ids=[1])
    yield "prime-rl step.jsonl", prime(step="x")

    def nemo(**changes: object) -> Writer:
        """A line of NeMo-RL's train data with changes."""
        return _changed(write_nemo_rl, lambda record: record.update(changes))

    yield "nemo lengths.jsonl", nemo(input_lengths=[999])
    yield "nemo length zero.jsonl", nemo(input_lengths=[0])
    yield "nemo values.jsonl", nemo(prev_logprobs=[[0.0]])
    yield "nemo mask.jsonl", nemo(token_loss_mask=[[3]])
    yield "nemo sample.jsonl", nemo(sample_loss_mask=["x"])
    yield "nemo ids.jsonl", nemo(token_ids=[[-1] * 40])

    def slime(changes: dict[str, object], **more: object) -> Writer:
        """slime's dump of one sample with changes."""

        def written(path: Path) -> None:
            """Writes it."""
            (sample,) = samples(1)
            sample.extra = changes
            write_slime(path, [sample], **more)

        return written

    yield "slime version.pt", slime({}, format_version=3)
    yield "slime samples.pt", slime({}, samples=5)
    yield "slime sample.pt", slime({}, samples=[5])
    yield "slime response.pt", slime({"response_lengths": 999})
    yield "slime no response.pt", slime({"response_lengths": None})
    yield "slime total.pt", slime({"total_lengths": 1})
    yield "slime values.pt", slime({"log_probs": torch.zeros(1)})
    yield "slime mask.pt", slime({"loss_masks": torch.ones(1)})
    yield "slime kept.pt", slime({"rollout_top_p_token_offsets": torch.tensor([0, 1])})
    yield "slime experts.pt", slime({"rollout_routed_experts": torch.zeros(1, 1, 1)})
    yield "slime nothing.pt", slime({"log_probs": None, "rollout_log_probs": None})


def parquet_files() -> Iterator[tuple[str, Writer]]:
    """parquet files of wrong types, damaged, or with more rows than they seem to have."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        return

    def table(rows: list[dict[str, object]]) -> Writer:
        """A file of these rows."""
        return lambda path: parquet.write_table(arrow.Table.from_pylist(rows), path)

    yield "parquet text.parquet", _bytes(b"PAR1 no PAR1")
    yield "parquet empty.parquet", _bytes(b"")
    yield "parquet no rows.parquet", table([])
    yield "parquet no values.parquet", table([{"token_ids": [1]}])
    yield "parquet text ids.parquet", table([{"token_ids": ["a"], "logprobs": [0.0]}])
    yield (
        "parquet null id.parquet",
        table([{"token_ids": [1, None], "logprobs": [0.0, 0.0]}]),
    )
    yield "parquet negative.parquet", table([{"token_ids": [-1], "logprobs": [0.0]}])
    yield "parquet length.parquet", table([{"token_ids": [1], "logprobs": [0.0, 0.0]}])
    yield "parquet float ids.parquet", table([{"token_ids": [1.5], "logprobs": [0.0]}])

    def cut(path: Path) -> None:
        """Half of a file."""
        write_parquet_bomb(path, 1000)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def write_parquet_bomb(path: Path, count: int) -> None:
        """A row of so many equal tokens."""
        zeros = arrow.array(np.zeros(count, np.int64))
        offsets = arrow.array(np.array([0, count], np.int32))
        lists = arrow.ListArray.from_arrays(offsets, zeros)
        whole = arrow.table(
            {"token_ids": lists, "logprobs": lists.cast(arrow.list_(arrow.float64()))}
        )
        parquet.write_table(whole, path, compression="zstd")

    yield "parquet cut.parquet", cut
    yield "parquet bomb.parquet", lambda path: write_parquet_bomb(path, 4 * 10**7)


def hostile_files(folder: Path) -> Iterator[Path]:
    """Writes each bad file into a folder, and yields its path."""
    for files in (
        field_files(),
        text_files(),
        packed_files(),
        saved_files(folder),
        tensor_files(),
        response_files(),
        trainer_files(),
        parquet_files(),
    ):
        for name, write in files:
            path = folder / name
            write(path)
            yield path


def write_good(folder: Path) -> list[Path]:
    """Files that are read, for changes at random."""
    some = samples(3, k=2)
    return [
        write_plain(folder / "plain.jsonl", some, "rollout"),
        write_completions(folder / "completions.jsonl", some),
        write_sglang(folder / "sglang.json", some),
        write_nemo_rl(folder / "nemo.jsonl", some),
        write_slime(folder / "slime.pt", some),
    ]
