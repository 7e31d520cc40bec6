"""Random and mutated files through the command line, in this process.

    python scripts/fuzz.py [--count 10000] [--seed 0]      a run; its summary as Markdown on stdout
    python scripts/fuzz.py --only gate --seed 1234         one input again

An input is a number: it seeds the generator that picks a target, a file from configs/ or
tests/data/reports/, and what is done to it. Whatever comes of it, these hold:

- an exit code of 0, 1, 2 or 3 and no unexpected exception, within `SECONDS` of the processor;
- no control character on stdout or stderr, but line ends;
- no element or attribute in a page that a harmless report's page cannot have; no HTML, heading or
  link in Markdown; no formula in CSV;
- `numdev gate` passes nothing that is damaged, worse or not measured (`_wrongly_passed`), and
  `numdev compare` does not call that the same;
- nothing is written outside the directory that was given.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import math
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

ROOT = Path(__file__).parent.parent
REPORTS = {p.stem: p for p in sorted((ROOT / "tests" / "data" / "reports").glob("*.json"))}
CONFIGS = {
    name: sorted((ROOT / "configs" / name).glob("*.yaml"))
    for name in ("audit", "sweep", "train", "gate")
}
SECONDS = 20
DEEP, BOMB, GONE = "@deep@", "@bomb@", "@gone@"
HOSTILE = (
    *("<fuzz0 onload=fuzz1>", "</td></svg><script>fuzz2()</script>", '" fuzz3="1', "' fuzz3='1"),
    *(
        "\x1b[31mred\x1b[0m",
        "\x1b]8;;http://fuzz4\x07link\x1b]8;;\x07",
        "\x07\x08\x00",
        "\u202etxt",
    ),
    *("=cmd|'/c calc'!A1", "+1+1", "-2+3", "@SUM(1)", "\t=1", "\r=1", "\n=1"),
    *("../../../fuzz5", "/tmp/fuzz6/x", "..", ".", "a/b", "con", "~root", "C:\\fuzz"),
    *("{{ 7*7 }}{% raise %}", "[bold red]x[/]", "[/]", "[link=http://fuzz]", "%s%n", "${x}"),
    *("# fuzz", "[fuzz](http://fuzz)", "![x](y)", "a|b|c", "```", "- x", "1. x", "\n\n# fuzz\n"),
    *("", " ", "é" * 3, "長" * 50, "x" * 5000, "\ufeff", "\u2028", "NaN", "null", "🙂"),
)
NUMBERS = (0, -1, 1, 2**31, 2**63, 10**30, -(10**400), 1e308, -1e308, 5e-324, 1e-12, 0.5, 1e6)
OTHERS = (None, True, False, [], {}, [[]], "", {"a": 1}, math.nan, math.inf, -math.inf, DEEP, BOMB)
LINES = (
    *("\tx: 1", "? [a]", "<<: *a", "&a [*a]", "!!python/object:os.system x", "%YAML 9", "- - - -"),
    *("a: b: c", "...", "key: !!binary x", "1: 2", "2024-13-01: x"),
)
"""To be found in YAML."""
WORSE = {
    "nonfinite": (1, 1000),
    "expected_ratio": (50.0, 1e300),
    "status": ("failed", "skipped"),
    "suspicion": ("the scale is twice what it should be",),
}
"""What makes a sound row one that no gate may pass."""


class Broken(Exception):
    """An input that did what none may."""


@dataclass(frozen=True)
class Done:
    """What a command came to."""

    code: int
    out: str
    err: str


# --- the command line ----------------------------------------------------------------------------


def call(*arguments: str) -> Done:
    """Run `numdev` here, as `numdev.cli.main` does, with standard streams of its own."""
    from numdev.cli import main as cli

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(list(arguments))
        except SystemExit as stop:
            code = stop.code or 0
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    done = Done(code, *texts)
    if done.code not in (0, 1, 2, 3):
        raise Broken(f"exit code {done.code}")
    if "a bug of numdev" in done.err or "Traceback" in done.err:
        raise Broken(done.err.strip()[:300])
    if done.code in (2, 3) and not done.out and done.err.count("\n") != 1:
        raise Broken(f"not one line of error: {done.err[:200]!r}")
    _only_text(done.err)
    return done


@contextlib.contextmanager
def unmeasured() -> Iterator[None]:
    """Studies that stop where they would begin to measure."""
    from numdev.errors import MeasurementError

    def stop(*_: Any, **__: Any) -> None:
        raise MeasurementError("nothing is measured here", hint="it is a fuzzer")

    from numdev.audit import run as numdev_run

    with (
        mock.patch.object(numdev_run, "audit", stop),
        mock.patch("numdev.training.study.train", stop),
    ):
        yield


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Of this process, whatever else the machine does."""

    def late(*_: Any) -> None:
        raise Broken(f"takes more than {seconds} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# --- inputs --------------------------------------------------------------------------------------


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in JSON's data, the root left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def mutated(data: Any, rng: random.Random) -> Any:
    """The data with one to four places changed; half of the changes only change a text."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        found = list(places(data))
        if rng.random() < 0.5:
            found = [p for p in found if isinstance(at(data, p), str)] or found
            if found:
                path = rng.choice(found)
                at(data, path[:-1])[path[-1]] = rng.choice(HOSTILE)
        elif found:
            alike: dict[tuple[Any, ...], list[Any]] = {}  # or the many rows would get all of it
            for path in found:
                alike.setdefault(tuple(k for k in path if isinstance(k, str)), []).append(path)
            _change(data, rng.choice(rng.choice(list(alike.values()))), found, rng)
    return data


def _change(data: Any, path: tuple[Any, ...], found: list[Any], rng: random.Random) -> None:
    parent, key = at(data, path[:-1]), path[-1]
    what = rng.randrange(6)
    if what == 0:
        del parent[key]
    elif what == 1:
        parent[key] = rng.choice(NUMBERS)
    elif what == 2:
        parent[key] = rng.choice(OTHERS)
    elif what == 3:
        parent[key] = json.loads(json.dumps(at(data, rng.choice(found))))
    elif what == 4 and isinstance(parent, list):
        parent.insert(rng.randrange(len(parent) + 1), parent[key])
    elif what == 4:
        parent[rng.choice(HOSTILE)] = parent[key]
    else:
        parent[key] = rng.choice(HOSTILE)


def as_json(data: Any, rng: random.Random) -> bytes:
    text = json.dumps(data, ensure_ascii=rng.random() < 0.5)
    return _rotten(_deepened(text, rng, "[", "]").encode("utf-8", "surrogatepass"), rng)


def as_yaml(data: Any, rng: random.Random) -> bytes:
    """As YAML, or as JSON, which is YAML; sometimes with lines moved, anchors, tags."""
    if rng.random() < 0.3:
        return as_json(data, rng)
    text = _deepened(yaml.safe_dump(data, sort_keys=False), rng, "[", "]")
    if f"'{BOMB}'" in text:  # ten lists of ten lists of ten lists, ten deep
        layers = ["x0: &x0 [1]"]
        layers += [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]" for i in range(1, 10)]
        text = "\n".join((*layers, text.replace(f"'{BOMB}'", "*x9")))
    lines = text.splitlines()
    if rng.random() < 0.3 and lines:
        spot = rng.randrange(len(lines))
        lines[spot : spot + rng.randrange(2)] = [rng.choice(LINES)]
    return _rotten("\n".join(lines).encode("utf-8", "surrogatepass"), rng)


def _deepened(text: str, rng: random.Random, opening: str, closing: str) -> str:
    depth = rng.choice((20, 200, 2000, 50_000))
    return text.replace(f'"{DEEP}"', opening * depth + closing * depth).replace(
        f"'{DEEP}'", opening * depth + closing * depth
    )


def _rotten(raw: bytes, rng: random.Random) -> bytes:
    """One time in twelve cut off, or with a byte changed."""
    if rng.random() > 1 / 12 or not raw:
        return raw
    spot = rng.randrange(len(raw))
    return raw[:spot] if rng.random() < 0.5 else raw[:spot] + rng.randbytes(1) + raw[spot + 1 :]


def report_of(kind: str) -> Any:
    return json.loads(REPORTS[kind].read_text(encoding="utf-8"))


def sound() -> Any:
    """An audit's report that the default rules pass."""
    found = report_of("audit")
    found["rows"] = [r for r in found["rows"] if not r["kernel"].startswith("bad:")]
    found["rows"] = [r for r in found["rows"] if r["tensor"] == "out"]
    found["request"]["heads"] = None  # all of them are there
    for case in found["cases"]:
        case["heads"] = case["kv_heads"] = 2
    return found


# --- what must hold ------------------------------------------------------------------------------


def _only_text(text: str) -> None:
    bad = next((c for c in text if not c.isprintable() and c != "\n"), None)
    if bad is not None:
        raise Broken(f"control character {bad!r} in the output")


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {tag, *(f"@{name}" for name, _ in attrs)}


WORDS = """
    html head meta title style body main footer h1 h2 h3 p ul li b strong span br code details
    summary pre table thead tbody tr th td figure figcaption svg g line path rect circle text div
    @open @charset @name @content @http-equiv @lang @class @tabindex @role @aria-label @scope @title
    @viewbox @d @x @y @x1 @x2 @y1 @y2 @cx @cy @r @width @height @transform @text-anchor
"""
KNOWN = frozenset(WORDS.split())
"""Elements and attributes of the pages."""


def page_is_safe(page: str) -> None:
    strange = _Tags(page).found - KNOWN
    if strange:
        raise Broken(f"in the page: {sorted(strange)}")


def markdown_is_safe(text: str) -> None:
    _only_text(text)
    text = text.replace("<!-- -->", "")  # what keeps emoji and mentions from beginning
    if found := re.search(r"(?<!\\)(\\\\)*<|^#+ fuzz|(?<!\\)\]\(|(?<!\\)```", text, re.MULTILINE):
        raise Broken(f"in Markdown: {text[found.start() - 20 : found.end() + 40]!r}")


def csv_is_safe(text: str) -> None:
    csv.field_size_limit(sys.maxsize)
    for row in csv.reader(io.StringIO(text, newline="")):
        for cell in row:
            if cell.startswith(("=", "+", "-", "@", "\t", "\r")) and not _number(cell):
                raise Broken(f"a formula in CSV: {cell[:40]!r}")


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


SHOWN: dict[str, Callable[[str], None]] = {
    "html": page_is_safe,
    "markdown": markdown_is_safe,
    "csv": csv_is_safe,
    "terminal": _only_text,
    "json": lambda text: json.loads(text, parse_constant=lambda name: 1 / 0),
}


CELL = (
    *("case", "module", "layer", "call", "phase", "seed", "head"),
    *("kernel", "options", "format", "tensor"),
)


def _wrongly_passed(raw: bytes) -> str:
    """Why a report must not have passed, judged from its JSON alone; empty where it may."""
    found = json.loads(raw)
    if type(found.get("schema_version")) is not int or found["schema_version"] != 2:
        return "its schema version is not 1"
    rows = [r for r in found["rows"] if r.get("role") == "kernel"]
    if not any(r["status"] == "ok" for r in rows):
        return "no kernel was measured"
    cells = [str([r.get(k) for k in CELL]) for r in rows if r["status"] == "ok"]
    if len(set(cells)) < len(cells):
        return "a head is there twice"
    for row in rows:
        if row["status"] == "failed":
            return "a kernel failed"
        if row["status"] == "ok" and row.get("nonfinite") != 0:
            return "not finite, or not counted"
        if row.get("suspicion"):
            return "a different function"
        if row["tensor"] == "out" and (row.get("expected_ratio") or 0) >= 50:
            return "fifty times what is predicted"
    return ""


# --- targets -------------------------------------------------------------------------------------


def fuzz_report(rng: random.Random, folder: Path) -> str:
    """A mutated report of any kind, shown in any form."""
    kind, form = rng.choice(list(REPORTS)), rng.choice(list(SHOWN))
    path = folder / "report.json"
    path.write_bytes(as_json(mutated(report_of(kind), rng), rng))
    done = call("report", str(path), "--format", form)
    if done.code == 0:
        SHOWN[form](done.out)
    return f"{done.code}"


def fuzz_gate(rng: random.Random, folder: Path) -> str:
    """A mutated report before the default rules; half of the time made worse on purpose."""
    data, worse = sound(), rng.random() < 0.5
    if worse:
        rows = [r for r in data["rows"] if r["role"] == "kernel" and r["status"] == "ok"]
        key = rng.choice(list(WORSE))
        rng.choice(rows)[key] = rng.choice(WORSE[key])
    raw = as_json(data if worse else mutated(data, rng), rng)
    (folder / "report.json").write_bytes(raw)
    done = call("gate", str(folder / "report.json"), *rng.choice(((), ("--json",))))
    _only_text(done.out)
    if done.code == 0 and (worse or _wrongly_passed(raw)):
        raise Broken(f"passed: {_wrongly_passed(raw) or 'it was made worse'}")
    return f"{done.code}"


def fuzz_thresholds(rng: random.Random, folder: Path) -> str:
    """Mutated rules before a report of a kernel that computes something else; they may let it pass
    only where they are valid rules that do not look at what is wrong."""
    rules = yaml.safe_load(rng.choice(CONFIGS["gate"]).read_text(encoding="utf-8"))
    (folder / "gate.yaml").write_bytes(as_yaml(mutated(rules, rng), rng))
    done = call("gate", str(REPORTS["audit"]), "--rules", str(folder / "gate.yaml"))
    _only_text(done.out)
    if done.code == 0:
        _may_pass(folder / "gate.yaml")
    return f"{done.code}"


def fuzz_against(rng: random.Random, folder: Path) -> str:
    """A sound report against a mutated older one, or the reverse: nothing passes that is not in
    both."""
    new, old = sound(), sound()
    which = rng.choice(("new", "old"))
    raw = as_json(mutated(new if which == "new" else old, rng), rng)
    sides = {"new": json.dumps(new).encode(), "old": json.dumps(old).encode(), which: raw}
    for name, text in sides.items():
        (folder / f"{name}.json").write_bytes(text)
    done = call("gate", str(folder / "new.json"), "--against", str(folder / "old.json"))
    _only_text(done.out)
    if done.code == 0:
        if which == "new" and _wrongly_passed(raw):
            raise Broken(f"passed: {_wrongly_passed(raw)}")
        if _measured(sides["new"]) != _measured(sides["old"]):
            raise Broken("passed: not the same was measured in both")
    return f"{done.code}"


def _measured(raw: bytes) -> set[tuple[Any, ...]]:
    """What of kernels under audit has numbers to judge."""
    keys = ("case", "module", "layer", "call", "phase", "head", "kernel", "format", "tensor")
    return {
        tuple(row.get(key) for key in keys)
        for row in json.loads(raw)["rows"]
        if row["role"] == "kernel" and row["status"] == "ok" and row.get("elements") != 0
    }


def fuzz_compare(rng: random.Random, folder: Path) -> str:
    """Two audits of which the second is mutated, or made worse on purpose: that is told."""
    data, worse = sound(), rng.random() < 0.3
    (folder / "a.json").write_text(json.dumps(data), encoding="utf-8")
    if worse:
        rows = [r for r in data["rows"] if r["role"] == "kernel" and r["status"] == "ok"]
        key = rng.choice(list(WORSE))
        rng.choice(rows)[key] = rng.choice(WORSE[key])
    (folder / "b.json").write_bytes(as_json(data if worse else mutated(data, rng), rng))
    sides = [str(folder / name) for name in rng.sample(("a.json", "b.json"), 2)]
    done = call("compare", *sides, "-o", str(folder / "out"), "--overwrite")
    _only_text(done.out)
    if done.code == 0 and worse and sides[1].endswith("b.json"):
        raise Broken("nothing moved, and it was made worse")
    page = folder / "out" / "report.html"
    if page.exists():
        page_is_safe(page.read_text(encoding="utf-8"))
        for table in page.parent.glob("*.csv"):
            csv_is_safe(table.read_text(encoding="utf-8"))
    return f"{done.code}"


def fuzz_init(rng: random.Random, folder: Path) -> str:
    """Thresholds fitted to a mutated report, which then pass it, and nothing that is wrong."""
    raw = as_json(mutated(sound(), rng), rng)
    report, file = str(folder / "report.json"), str(folder / "fitted.yaml")
    (folder / "report.json").write_bytes(raw)
    done = call("gate", report, "--init", "-o", file)
    if done.code == 0:
        if call("gate", report, "--thresholds", file).code:
            raise Broken("the report does not pass thresholds fitted to it")
        wrong = _wrongly_passed(raw)
        if wrong and "predicted" not in wrong:  # what was measured is the standard
            raise Broken(f"fitted to it: {wrong}")
    return f"{done.code}"


def _may_pass(path: Path) -> None:
    """Whether rules without exceptions really leave out what is wrong with the report: its bad
    kernels have a suspicion, and errors of 300 times what is predicted."""
    for rule in yaml.safe_load(path.read_text(encoding="utf-8"))["thresholds"]:
        whole = not set(rule) - {"name", "metric", "at_most", "below", "absent", "may_lack"}
        limit = rule.get("at_most", rule.get("below"))
        strict = rule["metric"] == "expected_ratio" and limit is not None and limit < 100
        if whole and (strict or rule["metric"] == "suspicion"):
            raise Broken(f"passed by {rule}")


def fuzz_config(rng: random.Random, folder: Path) -> str:
    """A mutated configuration, up to where measuring would begin."""
    command = rng.choice(("audit", "sweep", "train"))
    data = yaml.safe_load(rng.choice(CONFIGS[command]).read_text(encoding="utf-8"))
    data.pop("checkpoint", None)
    path = folder / "config.yaml"
    path.write_bytes(as_yaml(mutated(data, rng), rng))
    extra = ("--dry-run",) if command == "sweep" else ("-o", str(folder / "out"))
    with unmeasured():
        done = call(command, str(path), *extra)
    _only_text(done.out)
    return f"{done.code}"


def fuzz_bounds(rng: random.Random, folder: Path) -> str:
    """The bounds of a mutated training run, written as every result is."""
    path = folder / "report.json"
    path.write_bytes(as_json(mutated(report_of("train"), rng), rng))
    done = call("bounds", str(path), "-o", str(folder / "out"), "--overwrite")
    _only_text(done.out)
    if done.code == 0:
        page_is_safe((folder / "out" / "report.html").read_text(encoding="utf-8"))
        for table in (folder / "out").glob("*.csv"):
            csv_is_safe(table.read_text(encoding="utf-8"))
    return f"{done.code}"


def fuzz_names(rng: random.Random, folder: Path) -> str:
    """Folders named after kernels and variants stay where they are put."""
    from numdev.report import Finding
    from numdev.training.config import folder_of

    name = "".join(rng.choice((*HOSTILE, *"./\\-a"))[:40] for _ in range(rng.randrange(1, 4)))
    finding = Finding(
        rule=rng.choice(HOSTILE), severity="note", sentence="", kernel=name, formats=("x",),
        tensor=rng.choice((None, name)), count=0, judged=0,
    )  # fmt: skip
    for made in (finding.folder, f"{folder_of(name)}-seed0-step1"):
        if made in (".", "..") or Path(made).name != made or "\x00" in made:
            raise Broken(f"a folder called {made!r}")
    return "ok"


TARGETS: dict[str, Callable[[random.Random, Path], str]] = {
    "report": fuzz_report,
    "gate": fuzz_gate,
    "thresholds": fuzz_thresholds,
    "against": fuzz_against,
    "compare": fuzz_compare,
    "init": fuzz_init,
    "config": fuzz_config,
    "bounds": fuzz_bounds,
    "names": fuzz_names,
}
WEIGHTS = (25, 20, 12, 10, 10, 5, 10, 4, 4)


def one(target: str, rng: random.Random, folder: Path) -> str:
    """One input through one target: what it came to. Raises Broken."""
    inside = folder / "inside" / "a" / "b"
    inside.mkdir(parents=True, exist_ok=True)
    before = os.getcwd()
    try:
        os.chdir(inside)
        with limited(SECONDS):
            result = TARGETS[target](rng, inside)
    finally:
        os.chdir(before)
    strange = {p.name for p in (folder, folder / "inside", inside.parent) for p in p.iterdir()}
    if strange - {"inside", "a", "b"}:
        raise Broken(f"written outside: {sorted(strange - {'inside', 'a', 'b'})}")
    return result


def _memory(gibibytes: int) -> None:
    """An input that asks for more is an error here, and no matter for the machine's other users."""
    size = gibibytes * 2**30
    resource.setrlimit(resource.RLIMIT_DATA, (size, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def every_place(folder: Path) -> Iterator[tuple[str, str]]:
    """Every kind of place in every kind of report, removed, emptied, of another type or too large:
    what each came to, and what it broke if it did."""
    path, done = folder / "report.json", Done(0, "", "")
    for kind in REPORTS:
        whole = report_of(kind)
        alike = {tuple("*" if isinstance(k, int) else k for k in p): p for p in places(whole)}
        for name, place in alike.items():
            for new in (GONE, None, [], {}, 0, -1.5, 1e308, "text", [[]]):
                changed = json.loads(json.dumps(whole))
                at(changed, place[:-1])[place[-1]] = new
                if new is GONE:
                    del at(changed, place[:-1])[place[-1]]
                path.write_text(json.dumps(changed), encoding="utf-8")
                for form in SHOWN:
                    try:
                        done = call("report", str(path), "--format", form)
                        if done.code == 0:
                            SHOWN[form](done.out)
                        yield str(done.code), ""
                    except Broken as error:
                        yield "broken", f"{kind} {'.'.join(name)} = {new!r}, {form}: {error}"
                    if done.code:
                        break


def main() -> int:
    parser = argparse.ArgumentParser(description="Random and mutated files through numdev.")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(TARGETS), help="one input of this target: the seed")
    parser.add_argument("--places", action="store_true", help="every place of every report")
    given = parser.parse_args()
    _memory(4)
    if given.places:
        with tempfile.TemporaryDirectory() as folder:
            found = list(every_place(Path(folder)))
        print(Counter(code for code, _ in found), *(words for _, words in found if words), sep="\n")
        return any(words for _, words in found)
    began, results, broken = time.monotonic(), Counter[tuple[str, str]](), []
    for number in range(given.seed, given.seed + (1 if given.only else given.count)):
        rng = random.Random(number)
        target = rng.choices(list(TARGETS), WEIGHTS)[0]
        target = given.only or target
        with tempfile.TemporaryDirectory() as folder:
            try:
                results[target, one(target, rng, Path(folder))] += 1
            except Exception as error:
                if given.only:
                    traceback.print_exc()
                broken.append(f"{target} {number}: {type(error).__name__}: {error}")
                print(broken[-1], file=sys.stderr, flush=True)
    print(summary(results, broken, time.monotonic() - began))
    return bool(broken)


def summary(results: Counter[tuple[str, str]], broken: list[str], seconds: float) -> str:
    codes = sorted({code for _, code in results})
    lines = [f"| target | inputs | {' | '.join(codes)} |", f"|---|---:|{'---:|' * len(codes)}"]
    for target in TARGETS:
        counts = [results[target, code] for code in codes]
        lines.append(f"| {target} | {sum(counts)} | {' | '.join(map(str, counts))} |")
    total = sum(results.values()) + len(broken)
    said = f"{total} inputs in {seconds:.0f} s; {len(broken)} broke a rule."
    return "\n".join([*lines, "", said, *(f"- {line}" for line in broken)])


if __name__ == "__main__":
    sys.exit(main())
