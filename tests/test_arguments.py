"""Wrong arguments of the Python API: one UsageError with the name, what it takes and what
came."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from commands import ran
from gate_rows import report, row
from torch import Tensor, nn

import numdev
from numdev.argument_checks import checked, expect
from numdev.cases import AttentionCase, CaseRef
from numdev.errors import UsageError
from numdev.kernels import Kernel, find, options_of
from numdev.kernels.plain_functions import parameters_by_role

DRAWN = {"heads": 1, "seq_len": 4, "head_dim": 4}
QKV = torch.ones(1, 2, 4, 8)
PACKED = torch.ones(6, 2, 8)
BEGINS = torch.tensor([0, 2, 6])
META = QKV.to("meta")


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


class Model(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sdpa(x, x, x)


def case(**changed: Any) -> AttentionCase:
    ref = CaseRef(case="a")
    return AttentionCase(
        **{"ref": ref, "q": QKV, "k": QKV, "v": QKV, "scale": 0.3, **changed}
    )


def kernel(*name: Any, **fields: Any) -> Any:
    return numdev.kernel(*name, **fields)(lambda case: case.v)


def audit(*target: Any, **changed: Any) -> Any:
    return numdev.audit(*target, **{"kernels": "sdpa-math", "device": "cpu", **changed})


def varlen(**changed: Any) -> Any:
    same = {
        "q": PACKED,
        "k": PACKED,
        "v": PACKED,
        "cu_seqlens_q": BEGINS,
        "cu_seqlens_k": BEGINS,
    }
    return numdev.varlen_cases(**{**same, **changed})


drawn = partial(audit, cases=DRAWN)
model = partial(audit, Model())
check = partial(numdev.check, sdpa, cases=DRAWN, formats="bfloat16", device="cpu")
watch = partial(numdev.watch, Model())
plot = report(row()).plot

WRONG: Sequence[tuple[Callable[..., Any], dict[str, Any], str]] = [
    # what names something, and is empty
    (audit, {"target": ""}, "target: expected a string, a path, .*, got an empty string"),
    (audit, {"target": [""]}, "target: expected .*, got a list of an empty string"),
    (audit, {"target": "demo", "output": ""}, "output: expected .*an empty string"),
    (audit, {"target": "demo", "save_cases": ""}, ("save_cases: expected .*an empty string")),
    (audit, {"target": "demo", "inputs": ""}, "inputs: expected .*an empty string"),
    (audit, {"target": "demo", "text": [""]}, ("text: expected a value, got an empty string")),
    (audit, {"target": "demo", "tokenizer": ""}, ("tokenizer: expected a value, got an empty str")),
    (drawn, {"kernels": ""}, "kernels: expected .*an empty string"),
    (drawn, {"kernels": ["sdpa-math", ""]}, "kernels: expected .*"),
    (drawn, {"formats": ""}, "formats: expected .*an empty string"),
    (drawn, {"device": ""}, "device: expected a string or None, got an empty string"),
    (drawn, {"scheduler": ""}, "scheduler: expected .*an empty string"),
    (numdev.check, {"function": sdpa, "cases": ""}, "cases: expected .*an empty string"),
    (check, {"thresholds": ""}, "thresholds: expected .*an empty string"),
    (check, {"reproducers": ""}, "reproducers: expected .*an empty string"),
    (check, {"invariant": ""}, "invariant: expected .*an empty string"),
    (lambda: numdev.compare("", ""), {}, "reports: expected .*an empty string"),
    (numdev.save_cases, {"path": "", "cases": [case()]}, ("path: expected .*an empty string")),
    (kernel, {"name": ""}, "name: expected a string, got an empty string"),
    # of another type
    (audit, {"target": 3}, "target: expected .*, got 3"),
    (audit, {"target": Model}, "target: expected .*, got the class Model"),
    (drawn, {"kernels": 3}, "kernels: expected .*, got 3"),
    (drawn, {"kernels": [None]}, "kernels: expected .*, got a list of None"),
    (drawn, {"formats": [1]}, "formats: expected .*, got a list of 1"),
    (drawn, {"layers": 3}, r"layers: expected a sequence \(integer\) or None, got 3"),
    (drawn, {"rows": "many"}, "rows: expected an integer or None, got 'many'"),
    (drawn, {"seed": 1.5}, "seed: expected an integer or None, got 1.5"),
    (drawn, {"backward": "yes"}, "backward: expected True or False or None, got 'yes'"),
    (drawn, {"overwrite": None}, "overwrite: expected True or False, got None"),
    (drawn, {"say": 3}, "say: expected a function, got 3"),
    (drawn, {"workers": 0}, "--workers: expected at least 1, got 0"),
    (drawn, {"nonsense": 1}, "unknown key 'nonsense'"),
    (drawn, {"inputs": QKV}, "inputs: expected none beside attention calls"),
    (audit, {"cases": [DRAWN, case()]}, "cases: expected .*, got a list of 2"),
    (audit, {"cases": [3]}, "cases: expected .*, got a list of 3"),
    (audit, {"cases": QKV}, "cases: expected .*, got a Tensor"),
    (audit, {"target": "demo", "inputs": QKV}, ("inputs: expected a file of tensors .* a Tensor")),
    (model, {"inputs": "words"}, "inputs: expected the model's inputs .*, got 'words'"),
    (model, {"inputs": 3}, "inputs: expected .*, got 3"),
    (model, {"inputs": [QKV, QKV]}, "inputs: too many positional arguments"),
    (numdev.capture, {"model": None, "inputs": QKV}, ("model: expected a Module, got None")),
    (numdev.capture, {"model": Model(), "inputs": 3}, "inputs: expected .*, got 3"),
    (numdev.capture, {"model": Model(), "inputs": QKV, "seed": "a"}, "seed: expected an integer"),
    (numdev.capture, {"model": Model()}, ("capture: missing a required argument: 'inputs'")),
    (lambda: numdev.compare(3, 4), {}, ("reports: expected a string, a path or a Report, got 3")),
    (lambda: numdev.compare("a", "b", allow=3), {}, "allow: expected .*, got 3"),
    (numdev.measure, {}, "measure: missing a required argument: 'out'"),
    *(
        (numdev.measure, {**dict.fromkeys(("out", "q", "k", "v"), QKV), name: wrong}, f"{words}")
        for name, wrong, words in (
            ("out", None, "out: expected a Tensor, got None"),
            ("q", [1.0], "q: expected a Tensor, got a list of 1.0"),
            ("q", torch.tensor(1.0), (r"q: expected \[batch, heads, length, head_dim\], got \[\]")),
            ("q", torch.ones(1, 2, 4, 0), r"q: expected .*, got \[1, 2, 4, 0\]"),
            ("q", QKV.long(), "q, k, v: expected one floating-point dtype"),
            ("q", META, "expected a dense tensor on meta"),
            ("k", QKV.to_sparse(), "k: expected a dense tensor on cpu"),
            ("scale", "a", "scale: expected a number or None, got 'a'"),
            ("is_causal", 1, "is_causal: expected True or False, got 1"),
            ("mask", "causal", "mask: expected a Tensor or None, got 'causal'"),
            ("mask", torch.ones(9, 9), "mask has shape"),
        )
    ),
    (case, {"q": None}, "q: expected a Tensor, got None"),
    (case, {"scale": "a"}, "scale: expected a number, got 'a'"),
    (case, {"causal_offset": "a"}, "causal_offset: expected an integer, got 'a'"),
    (case, {"ref": CaseRef(case=["a"])}, "case: expected a string, got a list of 'a'"),
    (case, {"window": "ab"}, "window: expected .*, got 'ab'"),
    (case, {"window": (1, 2, 3)}, "window: expected .*, got a tuple of 3"),
    (case, {"softcap": [1]}, "softcap: expected a number or None, got a list of 1"),
    (numdev.check, {"function": "sdpa"}, ("function: expected a function or a Kernel, got 'sdpa'")),
    (check, {"cases": 3}, "cases: expected .*, got 3"),
    (check, {"cases": [3]}, "cases: expected .*, got a list of 3"),
    (check, {"formats": 3}, "formats: expected .*, got 3"),
    (check, {"seeds": "a"}, "seeds: expected .*, got 'a'"),
    (check, {"seeds": 1.5}, "seeds: expected .*, got 1.5"),
    (check, {"backward": "always"}, ("backward: expected True or False or 'auto', got 'always'")),
    (check, {"thresholds": 3}, "thresholds: expected .*, got 3"),
    (check, {"claims": "fa2"}, "claims: expected a mapping or None, got 'fa2'"),
    (check, {"claims": {1: 2}}, "claims: expected .*, got a dict"),
    (check, {"invariant": "nope"}, ("invariant: expected an axis of invariance, got 'nope'")),
    (partial(numdev.check_attention, sdpa), {"nope": 1}, ("check: got an unexpected keyword")),
    (numdev.save_cases, {"path": 3, "cases": []}, ("path: expected a string or a path, got 3")),
    (numdev.save_cases, {"path": "a", "cases": QKV}, "cases: expected .*, got a Tensor"),
    (numdev.save_cases, {"path": "a", "cases": case()}, ("cases: expected .*, got an AttentionCase")),
    (numdev.save_cases, {"path": "a\0", "cases": []}, r"path: expected a path that .* got 'a\\x00'"),
    (numdev.dump_logprobs, {"path": "a\0.jsonl", "token_ids": [1], "logprobs": [-1.0]}, "path: .* name a file"),
    (drawn, {"output": "a\0"}, "output: expected a path that can name a file"),
    (varlen, {"q": torch.tensor(1.0)}, r"q: expected a dense tensor of 3 axes, got \[\]"),
    (varlen, {"cu_seqlens_q": [0, 2, 6]}, ("cu_seqlens_q: expected a Tensor, got a list of 3")),
    (varlen, {"cu_seqlens_q": BEGINS.float()}, ("cu_seqlens_q: .* tensor of integers with 1 axis")),
    (varlen, {"seqused_k": torch.ones(2, 2).long()}, "seqused_k: .* with 1 axis, got"),
    (varlen, {"block_table": torch.tensor(1)}, "k: expected a dense tensor of 4 axes"),
    (varlen, {"window_size": 3}, "window_size: expected .*, got 3"),
    (varlen, {"layer": "a"}, "layer: expected an integer or None, got 'a'"),
    (numdev.watch, {"model": None}, "model: expected a Module, got None"),
    (watch, {"every": "often"}, "every: expected an integer, got 'often'"),
    (watch, {"heads": None}, "heads: expected an integer, got None"),
    (watch, {"tell": 3}, "tell: expected a function, got 3"),
    (kernel, {"name": 3}, "name: expected a string, got 3"),
    (kernel, {"name": "x", "options": 3}, "options: expected a mapping or None, got 3"),
    (kernel, {"name": "x", "supports": 3}, "supports: expected a function, got 3"),
    (kernel, {"name": "x", "nope": 3}, "kernel 'x': expected a field of .*, got 'nope'"),
    (kernel, {"name": "x", "backward": "no"}, ("backward: expected 'autograd', a function or None")),
    (lambda: numdev.kernel("x")(3), {}, "function: expected a function, got 3"),
    (lambda: numdev.kernel("x")(min), {}, "kernel builtins:min: cannot read the function's param"),
    (options_of, {"function": min}, "kernel builtins:min: cannot read the function's parameters"),
    (parameters_by_role, {"function": torch.add}, "add: cannot read the function's parameters"),
    (find, {"name": "a\0.py:f"}, "no such file"),
    (find, {"name": f"{'x' * 256}.py:f"}, "xxx.py: no such file"),
    (find, {"name": f"{'y' * 256}.py"}, "yyy.py: no such file"),
    (find, {"name": "z" * 254}, "unknown kernel 'zzz"),
    (Kernel, {"name": "x", "function": 3}, "function: expected a function, got 3"),
    (plot, {"metric": 3}, "metric: expected a string, got 3"),
    (plot, {"tensor": None}, "tensor: expected a string, got None"),
    (plot, {"nope": 3}, "draw: got an unexpected keyword argument 'nope'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "arguments", "words"), WRONG, ids=[x[2] for x in WRONG]
)
def test_wrong_arguments_are_named(
    function: Callable[..., Any], arguments: dict[str, Any], words: str
) -> None:
    """One line: what was expected, and what came."""
    with pytest.raises(UsageError) as caught:
        function(**arguments)
    assert re.search(words, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(arguments.get("name", "")))


@checked
def public(
    number: float = 1.0, *, name: str = "", mode: bool | Literal["auto"] = False,
    sides: tuple[int, int] = (0, 0), of: Sequence[str | Path] = (),
    any_order: Collection[str] = (), **more: Any,
) -> tuple[Any, ...]:  # fmt: skip
    return number, name, mode, sides, of, any_order, more


@pytest.mark.parametrize(
    "right",
    [{}, {"number": 2}, {"number": 0.5}, {"name": ""}, {"name": "a"}, {"mode": "auto"},
     {"mode": True}, {"sides": (1, 2)}, {"sides": [1, 2]}, {"of": ["a", Path("b")]},
     {"of": {"a": 1}.keys()}, {"any_order": {"a"}}, {"other": ""}],
)  # fmt: skip
def test_right_arguments_arrive_as_they_are(right: dict[str, Any]) -> None:
    """A default may be empty, an integer is a number, and a set is a collection."""
    accepted = {"number": 1.0, "name": "", "mode": False, "sides": (0, 0), "of": (),
                "any_order": ()}  # fmt: skip
    others = {name: x for name, x in right.items() if name not in accepted}
    assert public(**right) == (*list({**accepted, **right}.values())[:6], others)


@pytest.mark.parametrize(
    "wrong",
    [{"number": True}, {"number": "1"}, {"name": None}, {"mode": "never"}, {"mode": 1},
     {"sides": (1,)}, {"sides": (1, "a")}, {"of": "ab"}, {"of": b"ab"}, {"of": [""]},
     {"of": torch.ones(2)}, {"of": {"a": 1}}, {"of": {"a"}}, {"sides": {1, 2}},
     {"any_order": "a"}],
)  # fmt: skip
def test_what_an_annotation_does_not_allow(wrong: dict[str, Any]) -> None:
    """True is no number; a string, a mapping and a set are no sequences; a pair has
    two."""
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))}: expected "):
        public(**wrong)


@pytest.mark.parametrize(
    ("hint", "words"),
    [(Sequence[bool], "a sequence (True or False)"), (Sequence[int], "a sequence (integer)"),
     (Sequence[Literal["a b"]], "a sequence ('a b')")],
)  # fmt: skip
def test_what_a_sequence_may_have_is_told_without_articles(hint: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        expect("x", 3, hint)
    assert str(caught.value) == f"x: expected {words}, got 3"


@pytest.mark.parametrize(
    "typed",
    [["audit", ""], ["audit", "demo", "-o", ""], ["audit", "demo", "--output="],
     ["gate", ""], ["report", ""], ["compare", "", ""], ["audit", "demo", "--text="]],
)  # fmt: skip
def test_an_empty_argument_of_the_command_line(typed: list[str], capsys: Any) -> None:
    """Names nothing; as a path it would be the directory one stands in."""
    code, out, err = ran(capsys, *typed)
    assert (code, out) == (2, "")
    assert err.startswith("numdev: error: an argument is empty")
