"""Configurations: grids, names, and errors that say which key and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from numdev.errors import UsageError
from numdev.request_models import DEFAULT_KERNELS, AuditConfig, Choice, sweep_request
from numdev.yamlfile import bundled_path, read_yaml

SIZES: dict[str, Any] = {"heads": 4, "seq_len": 8, "head_dim": 16}


@pytest.fixture
def read(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Read a configuration from YAML text, or from data that is written as YAML."""

    def read_it(content: Any) -> AuditConfig:
        path = tmp_path / "audit.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return read_yaml(path, AuditConfig)

    return read_it


def one(**fields: Any) -> dict[str, Any]:
    return {"cases": [{"name": "a", **SIZES, **fields}]}


def test_defaults(read: Any) -> None:
    """What is not said, or said to be null, has the default of the command or of a plain
    case."""
    config = read({**one(), "formats": None})
    case = config.cases[0]
    assert (config.checkpoint, config.formats, config.seed) == (None, ("bfloat16",), 0)
    assert config.kernels == DEFAULT_KERNELS
    assert config.model_fields_set == {"cases"}
    assert (case.batch, case.kv_heads, case.kv_len, case.v_dim) == (1, None, None, None)
    assert (case.causal, case.causal_offset, case.window, case.scale) == (
        False,
        0,
        None,
        None,
    )
    assert case.inputs == Choice(name="normal")
    assert (case.mask, case.layout) == (None, "contiguous")


def test_all_cells_of_a_grid_come_from_one_entry(read: Any) -> None:
    """Also those of an input regime that is a grid itself; and where the entry is called
    as a place is."""
    ties = {"name": "ties", "count": [2, 7], "strength": [4, 8]}
    grid = one(name="a/inputs=ties", causal=[True, False], inputs=[ties, "normal"])
    cases = read(grid).cases
    assert (len(cases), {case.entry for case in cases}) == (10, {"a/inputs=ties"})
    assert {case.entry for case in read(one(name="b, x=1")).cases} == {"b, x=1"}


def test_a_sweeps_flags_beat_its_file(tmp_path: Path) -> None:
    """`seed` is where the file's seeds are counted from; an option given no time says
    nothing."""
    path = tmp_path / "s.yaml"
    path.write_text(
        yaml.safe_dump({**one(), "repeats": 2, "seeds": 3, "formats": "float16"})
    )
    flags = {"repeats": 4, "rows": 8, "seed": 5, "kernels": (), "device": None}
    result = sweep_request(path, flags)
    assert (result.repeats, result.rows, result.seeds) == (4, 8, (5, 6, 7))
    assert (result.formats, result.kernels, result.device) == (
        ("float16",),
        DEFAULT_KERNELS,
        "auto",
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        # A misspelt key, with its place and the nearest one that exists there.
        ({**one(), "kernel": ["baseline"]}, ("unknown key 'kernel'; did you mean 'kernels'")),
        ({**one(), "zzzz": 1}, ("unknown key 'zzzz'; known: backward, cases, checkpoint, control")),
        (one(hed_dim=8), r"unknown key 'cases\.0\.hed_dim'; did you mean 'head_dim'"),
        (one(inputs={"name": "sink", "options": {}, "option": 1}),
         r"unknown key 'cases\.0\.inputs\.option'; did you mean 'options'"),
        ({**one(), "kernels": [{"name": "k", "options": {}, "nam": 1}]},
         r"unknown key 'kernels\.0\.nam'; did you mean 'name'"),
        # A wrong value, with its key.
        (one(heads=[4, 0]), r"cases\.1\.heads: .*greater than 0"),
        (one(heads=6, kv_heads=4), (r"cases\.0: heads \(6\) must be a multiple of kv_heads \(4\)")),
        (one(window=-1), r"cases\.0\.window: .*greater than 0"),
        (one(mask="paddin"), (r"cases\.0\.mask: expected 'all_true', 'causal', 'random'")),
        (one(layout="bshd"), (r"cases\.0\.layout: expected 'contiguous', 'transposed', 'p")),
        (one(layout="packed", kv_len=9), (r"cases\.0: layout packed: .* one length and head_dim")),
        (one(heads=[]), "heads is an empty list; give it values"),
        (one(inputs=[{"name": "sink", "strength": []}]), (r"inputs\.strength is an empty list")),
        ({"cases": [*one()["cases"], *one(causal=True)["cases"]]}, ("cases: names a twice")),
        (one(name=5, heads=[4, 8]), r"cases\.0\.name: expected a valid string, got 5"),
        # Of several types the one that the value has, else all of them
        (one(inputs={"name": "one_hot", "margin": float("inf")}),
         r"cases\.0\.inputs\.options\.margin: expected a finite number, got inf$"),
        (one(inputs={"name": "sink", "options": {"strength": {"a": 1}}}),
         r"cases\.0\.inputs\.options\.strength: expected a valid boolean or a valid integer "
         r"or a valid number or a valid string, got \{'a': 1\}"),
        (one(softcap=0), r"cases\.0\.softcap: .*greater than 0"),
        ({"cases": [{"name": "a"}]}, r"cases\.0\.heads: expected a value, got none"),
        ({**one(), "kernels": [3]}, r"kernels\.0: "),
        ({**one(), "length": 0}, "length: .*greater than 0"),
        ({"checkpoint": "demo", **one()}, "give either `checkpoint` or `cases`"),
        ("seed: 0\n", "give either `checkpoint` or `cases`"),
        # Text that is no YAML, with its line; nothing in it is executed.
        ("cases:\n  - name: a\n   heads: 4\n", "not valid YAML"),
        ("a: !!python/object/apply:os.system ['true']\n", ("not valid YAML: could not det")),
        ("seed: 0\nseed: 1\n", "not valid YAML: the key 'seed' is repeated"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(read: Any, content: Any, says: str) -> None:
    """The file, the line, the place of the key, and what is wrong with it, in one
    sentence."""
    with pytest.raises(UsageError, match=rf"audit\.yaml, line \d+: {says}") as caught:
        read(content)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """No file, a directory, binary and impossible values are usage errors that name the
    path."""
    for name, content in (("binary", b"\xff\xfe\x00seed"), ("date", b"seed: 2024-13-45\n"),
                          ("empty", b""), ("list", b"- 1\n")):  # fmt: skip
        (tmp_path / name).write_bytes(content)
    for name in ("missing", ".", "binary", "date", "empty", "list"):
        path = tmp_path / name
        with pytest.raises(
            UsageError, match=r"cannot be read|expected a mapping"
        ) as caught:
            read_yaml(path, AuditConfig)
        assert str(path) in caught.value.message
    with pytest.raises(UsageError, match=r"nope\.yaml: cannot be read") as caught:
        read_yaml(Path("configs/nope.yaml"), AuditConfig)
    # And not that numdev is to be reinstalled
    assert caught.value.hint == "give a YAML file"


@pytest.mark.parametrize(
    "path", sorted(bundled_path("audit/default.yaml").parent.glob("*.yaml"))
)
def test_bundled_audits_are_valid(path: Path) -> None:
    """Every configuration that ships for `audit` can be read."""
    config = read_yaml(path, AuditConfig)
    assert config.cases or config.checkpoint
