"""Plant the faults of tests/mutations.yaml, one at a time, and see which tests notice.

    python scripts/mutate.py --check                   every fault can be planted, and compiles
    python scripts/mutate.py --baseline --jobs 16      the listed tests, without a fault
    python scripts/mutate.py --jobs 16                 all faults
    python scripts/mutate.py w1-diluted holm           some, by id or by area
    python scripts/mutate.py --tests 'tests/test_*.py' against other tests than those listed

Each fault gets a copy of the tree and a pytest of its own, which ends at the first test that fails.
A test that hangs notices, too. The exit code is 0 where every fault was caught.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = shutil.ignore_patterns(
    *("__pycache__", ".git", ".venv", ".*_cache", "numdev-reports", "*.egg-info", "shared")
)
Fault = dict[str, Any]


def main() -> int:
    """Run what the command line asks for; 0, or 1 where a fault was not caught or not planted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("which", nargs="*", metavar="ID", help="ids or areas  [all]")
    parser.add_argument("--list", type=Path, default=ROOT / "tests/mutations.yaml")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time  [1]")
    parser.add_argument("--tests", help="a pattern of test files, in place of those listed")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one fault  [900]")
    parser.add_argument("--pytest", default="", help="further arguments of pytest")
    parser.add_argument("--json", type=Path, default=Path("mutations.json"), help="the results")
    parser.add_argument("--check", action="store_true", help="plant and compile, run nothing")
    parser.add_argument("--baseline", action="store_true", help="run the listed tests unchanged")
    options = parser.parse_args()
    faults = chosen(yaml.safe_load(options.list.read_text(encoding="utf-8")), options.which)
    wrong = [problem for fault in faults if (problem := unplantable(fault))]
    sys.stderr.writelines(f"{problem}\n" for problem in wrong)
    if options.check or wrong:
        print(f"{len(faults) - len(wrong)} of {len(faults)} faults can be planted")
        return 1 if wrong else 0
    if options.baseline:
        files = dict.fromkeys(file for fault in faults for file in listed(fault, options.tests))
        faults = [{"id": file, "tests": [file]} for file in files]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = []
        for found in pool.map(lambda fault: tried(fault, options), faults):
            results.append(found)
            print(f"{found['id']:28} {found['by']:68} {found['seconds']:6.0f} s", flush=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    counts = {word: sum(r["outcome"] == word for r in results) for word in OUTCOMES.values()}
    if options.baseline:
        print(f"{counts['survived']}/{len(results)} files pass without a fault")
        return int(counts["survived"] < len(results))
    survivors = ", ".join(r["id"] for r in results if r["outcome"] == "survived") or "none"
    tally = f"caught {counts['caught']}/{len(results)}, could not be tried {counts['broken']}"
    print(f"{tally}; survived: {survivors}")
    return int(counts["caught"] < len(results))


OUTCOMES = {0: "survived", 1: "caught", 2: "broken"}
"""By pytest's exit code; above 2, where it collected or selected nothing, `broken` too."""


def chosen(faults: list[Fault], which: list[str]) -> list[Fault]:
    """Those with one of these ids or areas, or all; exits for a name that none has."""
    if unknown := {*which} - {f[key] for f in faults for key in ("id", "area")}:
        sys.exit(f"no fault is called {', '.join(unknown)}")
    return [f for f in faults if not which or {f["id"], f["area"]} & {*which}]


def unplantable(fault: Fault) -> str | None:
    """Why a fault cannot be planted in this tree; None where it can."""
    path = ROOT / fault["file"]
    if not path.is_file():
        return f"{fault['id']}: {fault['file']}: no such file"
    count = (text := path.read_text(encoding="utf-8")).count(fault["old"])
    if count != 1 or fault["old"] == fault["new"]:
        return f"{fault['id']}: {fault['file']}: expected 1 place to plant it, found {count}"
    if path.suffix == ".py":
        try:
            ast.parse(text.replace(fault["old"], fault["new"]))
        except SyntaxError as error:
            return f"{fault['id']}: {fault['file']}: does not compile ({error})"
    lacking = [file for file in fault["tests"] if not (ROOT / file).is_file()]
    return f"{fault['id']}: no such tests: {lacking}" if lacking else None


def listed(fault: Fault, pattern: str | None) -> list[str]:
    """The test files to run, from the root of the tree."""
    if pattern is None:
        return list(fault["tests"])
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def tried(fault: Fault, options: argparse.Namespace) -> dict[str, Any]:
    """One fault in a copy of the tree: its outcome, by which test, and what pytest said last."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="numdev-mutate-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=SKIPPED, symlinks=True)
        if "file" in fault:
            path = tree / fault["file"]
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(fault["old"], fault["new"]), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-m", "not gpu", "--basetemp", f"{folder}/tmp", *options.pytest.split()]
        command += listed(fault, options.tests)
        alone = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        log = Path(folder) / "log"  # no pipe: what a test leaves behind would keep it open
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=tree, env=os.environ | alone, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        try:
            code: int | None = process.wait(options.limit)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        said = log.read_text(encoding="utf-8", errors="replace")
    outcome = "caught" if code is None else OUTCOMES.get(code, "broken")
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - .*)?$", said, re.MULTILINE)
    by = "timeout" if code is None else failed[1] if code == 1 and failed else outcome.upper()
    last = said.strip().splitlines()[-12:] if outcome != "survived" else []
    seconds = round(time.monotonic() - start, 1)
    return {"id": fault["id"], "outcome": outcome, "by": by, "seconds": seconds, "said": last}


if __name__ == "__main__":
    sys.exit(main())
