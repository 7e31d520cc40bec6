"""Record what numdev's commands report, and compare the recordings of two trees field by
field.

    python scripts/golden.py record DIR [--tree ROOT] [--quick]
    python scripts/golden.py compare OLD NEW

tests/golden.yaml says which commands are recorded and which differences are allowed.
Everything runs on one thread of a CPU, where floats are equal by bits if nothing of the
computation changed. Lists of rows are matched by what identifies a row, so their order
may differ. Reproducers that were written are run, too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
PLAN: dict[str, Any] = yaml.safe_load((ROOT / "tests/golden.yaml").read_text())
IDENTITY = (
    *(
        "case",
        "module",
        "seed",
        "role",
        "kernel",
        "options",
        "format",
        "tensor",
        "head",
        "batch",
    ),
    *(
        "row",
        "variant",
        "group",
        "step",
        "name",
        "site",
        "layer",
        "kind",
        "metric",
        "rule",
        "of",
    ),
)


def record(directory: Path, tree: Path, *, quick: bool) -> int:
    """How many commands ended with another exit code than the plan has: they recorded
    nothing."""
    failed = 0
    directory.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(str(p) for p in (tree, tree / "benchmarks"))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    # Else `-m` takes the numdev of the directory it is run in
    env["PYTHONSAFEPATH"] = "1"
    ask = [sys.executable, "-c", "import numdev; print(numdev.__file__)"]
    package = subprocess.run(
        ask, cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    if not Path(package.stdout.strip()).is_relative_to(tree):
        raise SystemExit(f"numdev: expected that of {tree}, got {package.stdout.strip()}")
    for name, command in PLAN["commands"].items():
        if quick and not command.get("quick"):
            continue
        arguments = command["run"].format(out=directory).split()
        if "-o" in arguments:
            arguments += ["--overwrite", "--quiet"]
        print(name, flush=True)
        run = [sys.executable, "-m", "numdev", *arguments]
        done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode not in command.get("codes", [0]):
            print(
                f"  exit code {done.returncode}: {done.stderr.strip()[-300:]}", flush=True
            )
            failed += 1
        result = {"code": done.returncode, "stderr": done.stderr[-2000:]}
        if "--json" in arguments:
            result["stdout"] = json.loads(done.stdout) if done.stdout else None
        (directory / f"{name}.result.json").write_text(json.dumps(result))
    for script in sorted(directory.glob("*/reproducers/*/reproduce.py")):
        run = [sys.executable, "reproduce.py"]
        done = subprocess.run(
            run, cwd=script.parent, env=env, capture_output=True, text=True
        )
        result = {"code": done.returncode, "lines": done.stdout.splitlines()}
        (script.parent / "reproduced.json").write_text(json.dumps(result))
    return failed


def flat(data: Any, path: str = "", *, prose: bool = False) -> Iterator[tuple[str, Any]]:
    """Every value of a report with its path; rows of a list by what identifies them. Of
    prose the numbers alone: a field of sentences in one report is one of numbers in
    another."""
    if isinstance(data, dict):
        for key, value in data.items():
            if key not in PLAN["ignored"]:
                words = prose or key in PLAN["prose"]
                yield from flat(
                    value, f"{path}.{PLAN['renamed'].get(key, key)}", prose=words
                )
    elif isinstance(data, list):
        seen: dict[str, int] = {}
        for i, value in enumerate(data):
            label = str(i)
            if isinstance(value, dict):
                label = json.dumps(
                    {k: value[k] for k in IDENTITY if k in value}, sort_keys=True
                )
            seen[label] = seen.get(label, 0) + 1
            yield from flat(value, f"{path}[{label}#{seen[label]}]", prose=prose)
    elif not (prose and (data is None or isinstance(data, str))):
        yield path, data


def read(directory: Path, file: Path) -> Any:
    """A recorded file, without the path of its recording."""
    return json.loads(
        (directory / file).read_text().replace(str(directory.resolve()), "{out}")
    )


def equal(field: str, a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        close = math.isclose(a, b, rel_tol=PLAN["relative"].get(field, 0.0))
        return a == b or close or (math.isnan(a) and math.isnan(b))
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def compare(old: Path, new: Path) -> int:
    """The number of differences that are not allowed; prints the first of each field."""
    files = {p.relative_to(old) for p in old.rglob("*.json")}
    total, count = 0, 0
    for file in sorted(files):
        if not (new / file).exists():
            print(f"{file}: missing")
            count += 1
            continue
        a, b = (dict(flat(read(d, file))) for d in (old, new))
        shown: dict[str, int] = {}
        total += len(a)
        for path in [*a, *(p for p in b if p not in a)]:
            field = path.rsplit(".", 1)[-1].split("[")[0]
            metric = re.search(r'"metric": "(\w+)"', path)
            names = {field, metric and metric[1]}
            if names & {"stderr", *PLAN["dropped"]}:
                continue
            if any(re.search(pattern, path) for pattern in PLAN["dropped_paths"]):
                continue
            missing = object()
            x, y = a.get(path, missing), b.get(path, missing)
            if x is not missing and y is not missing and equal(field, x, y):
                continue
            count += 1
            shown[field] = shown.get(field, 0) + 1
            if shown[field] == 1:
                x, y = ("absent" if v is missing else repr(v) for v in (x, y))
                print(f"{file} {path[-300:]}: {x} -> {y}")
        for field, n in shown.items():
            print(f"  {file}: {n} x {field}")
    print(f"{total} values of {len(files)} files, {count} differences")
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record")
    recording.add_argument("directory", type=Path)
    recording.add_argument("--tree", type=Path, default=ROOT)
    recording.add_argument("--quick", action="store_true")
    comparing = verbs.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    options = parser.parse_args()
    if options.verb == "record":
        return bool(
            record(
                options.directory.resolve(), options.tree.resolve(), quick=options.quick
            )
        )
    return 1 if compare(options.old, options.new) else 0


if __name__ == "__main__":
    sys.exit(main())
