"""What a path is, told by its name and its first bytes: a command that takes another kind
of file says what it got, and which command takes that.

Whether a file of the right kind is whole is for its reader to say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from numdev.errors import UsageError
from numdev.report_kinds import REGISTERED
from numdev.request_models import AuditConfig, InvarianceConfig, SweepConfig

Kind = Literal[
    "cases", "audit", "sweep", "invariance", "train", "rules", "report", "page",
    "python", "captured", "tensors", "logprobs", "task", "definition",
]  # fmt: skip
LONGEST_HEADER = 100_000_000  # bytes that safetensors reads
TOP_KEY = re.compile(r"^([a-z_]+)\s*:", re.MULTILINE)
HEAD = 4096  # bytes of a report that name its kind, and of a JSON file that is none
# Of files that are models of packages not imported here; tests hold them to these
TRAIN_KEYS = frozenset(
    {"title", "model", "data", "batch", "steps", "seeds", "record", "record_every"}
    | {"optimiser", "variants", "checkpoints", "deterministic", "save_every", "device"}
)
RULE_KEYS = frozenset(
    {"name", "holds_for", "required", "skipped", "catches", "thresholds", "limits"}
    | {*REGISTERED}
)


class Use(NamedTuple):
    """What a kind of file is called, and the command that takes one, `{}` its path."""

    words: str
    command: str


YAML_USES: Mapping[Kind, Use] = {
    "cases": Use("a YAML file of attention cases", "numdev audit {}"),
    "audit": Use("a YAML file of numdev audit", "numdev audit {}"),
    "sweep": Use("a YAML file of numdev sweep", "numdev sweep {}"),
    "invariance": Use("a YAML file of numdev invariance", "numdev invariance {}"),
    "train": Use("a YAML file of numdev train", "numdev train {}"),
    "rules": Use("a YAML file of thresholds", "numdev gate REPORT --thresholds {}"),
}
USES: Mapping[Kind, Use] = {
    **YAML_USES,
    "report": Use("a report", "numdev report {}"),
    "page": Use("a page in HTML", "numdev report DIRECTORY"),
    "python": Use("a Python file", "numdev check {}:FUNCTION"),
    "captured": Use("captured tensors", "numdev audit {}"),
    "tensors": Use("a file of tensors", "numdev audit {}"),
    "logprobs": Use("records of log-probabilities", "numdev logprobs {}"),
    "task": Use("a task folder", "numdev check FILE.py --task {}"),
    "definition": Use("a definition", "numdev check FILE --definition {}"),
}
MODEL = "a checkpoint, captured tensors, or a YAML file of cases"
# What a command or an option of one takes, by kind
ACCEPTS: Mapping[str, str] = {
    "audit": "cases audit captured tensors",
    "invariance": "cases invariance captured tensors",
    "effects": "tensors",
    "diagnose": "cases captured tensors report",
    "sweep": "cases sweep",
    "train": "train",
    "logprobs": "logprobs tensors",
    "weights": "tensors report",
    "gate": "report",
    "report": "report",
    "compare": "report",
    "bounds": "report",
    "--effects": "report",
    "--thresholds": "rules",
    "--case": "cases captured",
    "--problem": "python",
    "--definition": "definition",
    "--task": "task",
}
# The same in words, where these are not those of the last kind
WORDS: Mapping[str, str] = {
    "audit": MODEL,
    "invariance": MODEL,
    "effects": "a checkpoint",
    "diagnose": "a checkpoint or captured tensors",
    "logprobs": "records of log-probabilities",
    "weights": "weights",
    "--case": "a YAML file of attention cases, or captured tensors",
}


def expect_file(path: Path | str, of: str) -> None:
    """Raises UsageError for a file or directory of another kind than a command or an
    option (`of`: one of ACCEPTS) takes, and names the command that takes it. A path that
    does not exist passes, and so does one whose kind is not known. `FILE.py:NAME` is
    refused in any case, unless Python files are taken."""
    words, accepted = accepted_by(of)
    file, colon, _ = str(path).partition(":")
    if colon and file.endswith(".py") and "python" not in accepted:
        raise UsageError(
            f"{path}: expected {words}, got a function", hint=f"numdev check {path}"
        )
    kind = kind_of_path(Path(path), accepted)
    if kind is None or kind in accepted:
        return
    got, use = USES[kind].words, USES[kind].command.format(path)
    option = f"{of} " if of.startswith("--") else ""
    raise UsageError(
        f"{option}{path}: expected {words}, got {got}", hint=f"{use} takes it"
    )


def accepted_by(of: str) -> tuple[str, tuple[Kind, ...]]:
    """Returns what a command or an option, one of ACCEPTS, takes: in words, and by kind
    in the order of USES."""
    kinds = tuple(kind for kind in USES if kind in ACCEPTS[of].split())
    return WORDS.get(of) or USES[kinds[-1]].words, kinds


def kind_of_path(path: Path, preferred: Iterable[Kind] = ()) -> Kind | None:
    """Returns the kind of a file or directory; None where there is none, where it cannot
    be read, and where nothing tells. Of several kinds of YAML file that know as many of
    its keys it is the first of the `preferred`, in the order of `yaml_keys`, else the
    first."""
    try:
        if path.is_dir():
            return _kind_of_directory(path)
        look = BY_SUFFIX.get(path.suffix.lower())
        if look is None or not path.is_file():
            return None
        return _kind_of_yaml(path, preferred) if look is _kind_of_yaml else look(path)
    except (OSError, ValueError, RecursionError):
        return None


def _kind_of_directory(path: Path) -> Kind | None:
    """Returns `report` or `task`; None for a directory of weights, which has many
    forms."""
    if (path / "report.json").is_file():
        return "report"
    return "task" if (path / "task.yml").is_file() else None


def _kind_of_yaml(path: Path, preferred: Iterable[Kind] = ()) -> Kind | None:
    """Returns the kind that knows most of a file's keys, so that one with a wrong key is
    told by its reader; None where none knows any. Of several it is the first of the
    `preferred`, in the order of `yaml_keys`, else the first. A file named task.yml is a
    `task`, whatever is in it. Raises OSError, and ValueError for what is no UTF-8."""
    if path.name == "task.yml":
        return "task"
    # By lines alone: the file is parsed by its reader, once and with all care
    keys = set(TOP_KEY.findall(path.read_text(encoding="utf-8")))
    counts = {kind: len(keys & fields) for kind, fields in yaml_keys().items()}
    most = max(counts.values())
    best = [kind for kind, count in counts.items() if count == most]
    if not most:
        return None
    return next((kind for kind in best if kind in set(preferred)), best[0])


def yaml_keys() -> dict[Kind, frozenset[str]]:
    """Returns the top-level keys that each kind of YAML file may have; of `cases` those
    that audit, sweep and invariance share."""
    audit, sweep, invariance = (
        frozenset(model.model_fields)
        for model in (AuditConfig, SweepConfig, InvarianceConfig)
    )
    return {
        "cases": audit & sweep & invariance,
        "audit": audit,
        "sweep": sweep,
        "invariance": invariance,
        "train": TRAIN_KEYS,
        "rules": RULE_KEYS,
    }


def _kind_of_json(path: Path) -> Kind | None:
    """Returns `report` or `definition` by a JSON file's first bytes; None for another."""
    with path.open("rb") as file:
        head = file.read(HEAD).decode(errors="replace")
    if re.match(r'\s*\{\s*"kind"\s*:', head) and '"schema_version"' in head:
        return "report"
    if all(f'"{key}"' in head for key in ("axes", "inputs", "outputs")):
        return "definition"
    return None


def _kind_of_safetensors(path: Path) -> Kind | None:
    """Returns `captured` or `tensors` by a safetensors file's header, which is a JSON
    object behind its length in eight bytes. None where that length is more than the
    file's, or than LONGEST_HEADER, and where the header or its metadata is no object.
    Raises ValueError for a header that is no JSON, as of an empty file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(path.stat().st_size, LONGEST_HEADER):
            return None
        header = json.loads(file.read(length))
    metadata = header.get("__metadata__") if isinstance(header, dict) else 0
    if not isinstance(metadata, dict | None):
        return None
    return "captured" if metadata and "numdev" in metadata else "tensors"


BY_SUFFIX: Mapping[str, Callable[[Path], Kind | None]] = {
    ".yaml": _kind_of_yaml,
    ".yml": _kind_of_yaml,
    ".json": _kind_of_json,
    ".safetensors": _kind_of_safetensors,
    ".py": lambda path: "python",
    ".html": lambda path: "page",
    **dict.fromkeys((".pt", ".pth", ".bin"), lambda path: "tensors"),
    **dict.fromkeys((".jsonl", ".ndjson", ".parquet"), lambda path: "logprobs"),
}
