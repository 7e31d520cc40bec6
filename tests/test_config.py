"""Configurations: grids, names, and errors that say which key and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from numdev.config import (
    DEFAULT_KERNELS,
    AuditConfig,
    AuditRequest,
    Choice,
)
from numdev.errors import UsageError
from numdev.yamlfile import bundled, expand, read_yaml

SIZES: dict[str, Any] = {"heads": 4, "seq_len": 8, "head_dim": 16}


@pytest.fixture
def read(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Read a configuration from YAML text, or from data that is written as YAML."""

    def read_it(content: Any) -> AuditConfig:
        text = content if isinstance(content, str) else yaml.safe_dump(content)
        path = tmp_path / "audit.yaml"
        path.write_text(text, encoding="utf-8")
        return read_yaml(path, AuditConfig)

    return read_it


def one(**fields: Any) -> dict[str, Any]:
    return {"cases": [{"name": "a", **SIZES, **fields}]}


def cells(**fields: Any) -> list[dict[str, Any]]:
    return list(expand({"name": "a", **fields}, "file.yaml"))


# --- grids ---------------------------------------------------------------------------------------


def test_several_lists_multiply() -> None:
    """Every combination, in order, each named by its place on every axis."""
    found = cells(heads=[1, 2], causal=[True, False], seq_len=8)
    assert [(c["heads"], c["causal"], c["seq_len"]) for c in found] == [
        (1, True, 8),
        (1, False, 8),
        (2, True, 8),
        (2, False, 8),
    ]
    assert [c["name"] for c in found] == [
        "a/heads=1,causal=True",
        "a/heads=1,causal=False",
        "a/heads=2,causal=True",
        "a/heads=2,causal=False",
    ]


def test_lists_inside_inputs() -> None:
    """A regime's parameters are axes too."""
    found = cells(seq_len=[8, 16], inputs={"name": "sink", "strength": [4, 8]})
    assert [(c["seq_len"], c["inputs"]) for c in found] == [
        (8, {"name": "sink", "strength": 4}),
        (8, {"name": "sink", "strength": 8}),
        (16, {"name": "sink", "strength": 4}),
        (16, {"name": "sink", "strength": 8}),
    ]
    assert found[1]["name"] == "a/seq_len=8,strength=8"


def test_regimes_as_an_axis() -> None:
    """Regimes in a list may have parameters, and these may be lists again; all names differ."""
    found = cells(
        inputs=[
            "normal",
            {"name": "sink", "strength": 4},
            {"name": "sink", "strength": 8},
            {"name": "ties", "count": [2, 3], "strength": 6},
        ]
    )
    assert [(c["name"], c["inputs"]) for c in found] == [
        ("a/inputs=normal", "normal"),
        ("a/inputs=sink(strength=4)", {"name": "sink", "strength": 4}),
        ("a/inputs=sink(strength=8)", {"name": "sink", "strength": 8}),
        ("a/inputs=ties(strength=6)/count=2", {"name": "ties", "count": 2, "strength": 6}),
        ("a/inputs=ties(strength=6)/count=3", {"name": "ties", "count": 3, "strength": 6}),
    ]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"heads": []}, r"file\.yaml: heads is an empty list; give it values"),
        ({"inputs": []}, r"file\.yaml: inputs is an empty list"),
        ({"inputs": {"name": "sink", "strength": []}}, r"inputs\.strength is an empty list"),
        ({"inputs": [{"name": "sink", "strength": []}]}, r"inputs\.strength is an empty list"),
    ],
)
def test_an_empty_axis_is_an_error(fields: dict[str, Any], says: str) -> None:
    """A grid without cells would silently measure nothing."""
    with pytest.raises(UsageError, match=says):
        cells(**fields)


def test_a_grid_is_validated_cell_by_cell(read: Any) -> None:
    """A wrong value in one cell is an error that names the cell and the key."""
    with pytest.raises(UsageError, match=r"audit\.yaml, line 3: cases\.1\.heads: .*greater than 0"):
        read(one(heads=[4, 0]))


@pytest.mark.parametrize("model", [AuditConfig, AuditRequest])
def test_two_cases_of_one_name_are_refused(model: Any) -> None:
    """Rows and tasks know a case by its name: of two alike, one would be lost."""
    cases = [{"name": "a", **SIZES}, {"name": "a", **SIZES, "causal": True}]
    extra = {"target": "x"} if model is AuditRequest else {}
    with pytest.raises(ValidationError, match="2 cases are called 'a'"):
        model(cases=cases, **extra)


# --- what is read --------------------------------------------------------------------------------


def test_defaults(read: Any) -> None:
    """What is not said, or said to be null, has the default of the command or of a plain case."""
    config = read({**one(), "formats": None})
    case = config.cases[0]
    assert (config.checkpoint, config.formats, config.seed) == (None, ("bfloat16",), 0)
    assert config.kernels == DEFAULT_KERNELS
    assert config.model_fields_set == {"cases"}
    assert (case.batch, case.kv_heads, case.kv_len, case.v_dim) == (1, None, None, None)
    assert (case.causal, case.causal_offset, case.window, case.scale) == (False, 0, None, None)
    assert case.inputs == Choice(name="normal")
    assert (case.mask, case.layout) == (None, "contiguous")


@pytest.mark.parametrize(
    ("written", "choice"),
    [
        ("sink", Choice(name="sink")),
        ({"name": "sink"}, Choice(name="sink")),
        ({"name": "sink", "strength": 4}, Choice(name="sink", options={"strength": 4})),
        (
            {"name": "sink", "options": {"strength": 4}},
            Choice(name="sink", options={"strength": 4}),
        ),
    ],
)
def test_choices_by_name(read: Any, written: Any, choice: Choice) -> None:
    """A regime, or a kernel, is a name, or a name with options beside it."""
    assert read(one(inputs=written)).cases[0].inputs == choice
    assert read({**one(), "kernels": [written]}).kernels == (choice,)


def test_a_checkpoint(read: Any) -> None:
    """A configuration names a checkpoint or gives cases, exactly one of them."""
    assert read({"checkpoint": "demo"}).checkpoint == "demo"
    for neither_nor_both in ({}, {"checkpoint": "demo", **one()}):
        with pytest.raises(UsageError, match="give either `checkpoint` or `cases`"):
            read(neither_nor_both or "seed: 0\n")


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({**one(), "kernel": ["baseline"]}, "unknown key 'kernel'; did you mean 'kernels'"),
        (
            {**one(), "zzzz": 1},
            "unknown key 'zzzz'; known: cases, checkpoint, control, denoise, device, explain",
        ),
        (one(hed_dim=8), r"unknown key 'cases\.0\.hed_dim'; did you mean 'head_dim'"),
        (one(sequence_length=8), r"unknown key 'cases\.0\.sequence_length'; did you mean 'seq_"),
        (
            one(inputs={"name": "sink", "options": {}, "option": 1}),
            r"unknown key 'cases\.0\.inputs\.option'; did you mean 'options'",
        ),
        (
            {**one(), "kernels": [{"name": "k", "options": {}, "nam": 1}]},
            r"unknown key 'kernels\.0\.nam'; did you mean 'name'",
        ),
    ],
)
def test_an_unknown_key_gets_the_closest(read: Any, content: Any, says: str) -> None:
    """A misspelt key is an error with its place and the nearest one that exists there."""
    with pytest.raises(UsageError, match=rf"audit\.yaml, line \d+: {says}"):
        read(content)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (one(heads=6, kv_heads=4), r"cases\.0: heads \(6\) must be a multiple of kv_heads \(4\)"),
        (one(heads="many"), r"cases\.0\.heads: Input should be a valid integer"),
        (one(seq_len=0), r"cases\.0\.seq_len: .*greater than 0"),
        (one(window=-1), r"cases\.0\.window: .*greater than 0"),
        (one(mask="paddin"), r"cases\.0\.mask: Input should be 'all_true', 'causal', 'random'"),
        (one(mask=True), r"cases\.0\.mask: Input should be 'all_true'"),
        (one(layout="bshd"), r"cases\.0\.layout: Input should be 'contiguous', 'transposed' or 'p"),
        (
            one(layout="packed", kv_len=9),
            r"cases\.0: layout packed: .* have one length and head_dim",
        ),
        (
            one(layout="packed", v_dim=8),
            r"cases\.0: layout packed: .* have one length and head_dim",
        ),
        (one(softcap=0), r"cases\.0\.softcap: .*greater than 0"),
        ({"cases": [{"name": "a"}]}, r"cases\.0\.heads: Field required"),
        ({"cases": ["a"]}, r"cases\.0: "),
        ({"cases": "a"}, "cases: "),
        ({**one(), "kernels": [3]}, r"kernels\.0: "),
        ({**one(), "length": 0}, "length: .*greater than 0"),
    ],
)
def test_a_wrong_value_is_named(read: Any, content: Any, says: str) -> None:
    """The file, the place of the key, and what is wrong with it, in one sentence."""
    with pytest.raises(UsageError, match=rf"audit\.yaml, line \d+: {says}") as caught:
        read(content)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cases:\n  - name: a\n   heads: 4\n", r"audit\.yaml, line 3: not valid YAML"),
        ("seed: 0\nformats: [bfloat16\n", r"audit\.yaml, line 3: not valid YAML"),
        ("seed: {\n", "not valid YAML"),
        ("a: !!python/object/apply:os.system ['true']\n", r"line 1: not valid YAML: could not det"),
        ("", "holds no mapping of keys"),
        ("- 1\n- 2\n", "holds no mapping of keys"),
        ("just text\n", "holds no mapping of keys"),
        ("seed: 2024-13-45\n", r"audit\.yaml: cannot be read \(month must be in 1"),
    ],
)
def test_malformed_yaml(read: Any, text: str, says: str) -> None:
    """The file and the line, not a traceback; nothing in it is executed."""
    with pytest.raises(UsageError, match=says):
        read(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a directory and a binary file are usage errors that name the path."""
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00seed")
    for path in (tmp_path / "missing.yaml", tmp_path, binary):
        with pytest.raises(UsageError, match=r"cannot be read") as caught:
            read_yaml(path, AuditConfig)
        assert str(path) in caught.value.message


LINED = """\
# comment
cases:
  - name: a
    heads: [1, 2]
    seq_len: 8
    head_dim: 8
  - name: b
    heads: 3
    seq_len: 0
    head_dim: 8
    inputs: {name: sink, strength: []}
kernels:
  - baseline
  - name: k
    block: []
"""


@pytest.mark.parametrize(
    ("without", "line"),
    [
        ((), "line 7: inputs.strength is an empty list"),
        (("    inputs: {name: sink, strength: []}\n",), "line 13: kernels: block is an empty list"),
        (
            ("    inputs: {name: sink, strength: []}\n", "    block: []\n"),
            "line 9: cases.2.seq_len",
        ),
    ],
)
def test_every_error_has_its_line(read: Any, without: tuple[str, ...], line: str) -> None:
    """Of the entry in the file, whatever cells a grid made of those before it."""
    text = LINED
    for part in without:
        text = text.replace(part, "")
    with pytest.raises(UsageError, match=rf"audit\.yaml, {line}"):
        read(text)


# --- what ships ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(bundled("audit/default.yaml").parent.glob("*.yaml")))
def test_bundled_audits_are_valid(path: Path) -> None:
    """Every configuration that ships for `audit` can be read, with cases of distinct names."""
    config = read_yaml(path, AuditConfig)
    assert config.cases or config.checkpoint
    assert len({case.name for case in config.cases}) == len(config.cases)
