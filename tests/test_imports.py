"""Who may import whom, and what must work without the heavy packages.

The table below is the architecture: dependency goes one way. A file it does not know, an import it
does not allow, and an edge nobody uses any more all fail, so that it cannot go stale.
"""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import numdev
from numdev import report
from numdev.system import System

ROOT = Path(numdev.__file__).parent.parent
PACKAGE = ROOT / "numdev"

# Module to the modules of numdev it imports, wherever in the file the import stands. "numdev" is
# the package itself, for its version.
ALLOWED: dict[str, set[str]] = {
    "numdev": {"api", "kernels", "loading.varlen", "testing"},
    "testing": {
        "cases",
        "checkcases",
        "checkwords",
        "errors",
        "gating.rules",
        "gating.verdict",
        "kernels",
        "kernels.plain",
        "report",
        "reproducers.functionsource",
        "studies.check",
        "system",
        "yamlfile",
    },
    "pytest_plugin": {"config", "render.html", "report", "testing", "yamlfile"},
    "checkwords": {"foreign", "gating.verdict", "gating.wording", "report"},
    "reproducers.functionsource": {"errors"},
    "checkcases": {
        "capturing.upstream",
        "cases",
        "config",
        "errors",
        "inputs",
        "loading.tensorfile",
        "sources",
        "yamlfile",
    },
    # The edge: parses, calls one study, writes, renders. All but errors inside the commands.
    "interrupt": set(),
    "cli": {
        "commands.audit",
        "commands.bounds",
        "commands.compare",
        "commands.diagnose",
        "commands.gate",
        "commands.kernels",
        "commands.report",
        "commands.requests",
        "commands.schema",
        "commands.sweep",
        "commands.train",
        "commands.weights",
        "ending",
        "errors",
        "numdev",
    },
    "commands": set(),
    "commands.options": set(),
    "commands.places": {
        "errors",
        "gating.rules",
        "gating.verdict",
        "render.github",
        "render.junit",
        "render.problems",
        "report",
    },
    "commands.requests": {"config", "errors", "yamlfile"},
    "commands.session": {
        "errors",
        "foreign",
        "interrupt",
        "render.html",
        "render.terminal",
        "report",
    },
    "commands.audit": {
        "cluster.crew",
        "cluster.early",
        "commands.options",
        "commands.requests",
        "commands.session",
        "execute",
        "studies.audit",
    },
    "commands.bounds": {
        "claim",
        "commands.options",
        "commands.session",
        "errors",
        "studies.bounds",
    },
    "commands.compare": {
        "claim",
        "collector",
        "commands.options",
        "commands.session",
        "errors",
        "studies.compare",
    },
    "commands.diagnose": {
        "commands.options",
        "commands.requests",
        "commands.session",
        "config",
        "diagnosis.request",
        "execute",
        "studies.diagnose",
    },
    "commands.gate": {
        "ahead",
        "collector",
        "commands.places",
        "ending",
        "errors",
        "findings",
        "gate",
        "gating.cells",
        "gating.fitting",
        "gating.rules",
        "render.verdicts",
        "report",
        "rowparts",
        "yamlfile",
    },
    "commands.kernels": {"conformance.checking", "foreign", "kernels", "render.terminal", "system"},
    "commands.report": {
        "errors",
        "foreign",
        "render.html",
        "render.markdown",
        "render.terminal",
        "report",
    },
    "commands.schema": {"schema"},
    "commands.sweep": {
        "cluster.crew",
        "cluster.early",
        "commands.options",
        "commands.requests",
        "commands.session",
        "execute",
        "studies.sweep",
    },
    "commands.train": {
        "commands.options",
        "commands.session",
        "execute",
        "studies.train",
        "training.config",
        "yamlfile",
    },
    "commands.weights": {
        "commands.options",
        "commands.session",
        "errors",
        "execute",
        "studies.weights",
    },
    # Leaves.
    "errors": set(),
    "system": {"errors"},
    "yamlfile": {"errors"},
    "ending": set(),
    "cluster.early": {"ending"},
    "report.kinds": {"report.record", "report.rows", "report.summaries"},
    "report.record": set(),
    "report.rows": {"report.record"},
    "report.summaries": {"report.record", "report.rows"},
    "report.sweep": {"report.kinds", "report.record", "report.rows"},
    "layers": {"errors"},
    "beside": {"bench", "deviation", "finiteness", "kernels", "noise", "suspicion.search"},
    "config": {"yamlfile"},
    "regimes.registry": {"cases", "regimes.twister"},
    "regimes.exact": {"cases", "regimes.registry"},
    "regimes.hazards": {"regimes.registry"},
    "regimes.constructed": {"formats", "regimes.registry"},
    "inputs": {
        "cases",
        "errors",
        "regimes.constructed",
        "regimes.exact",
        "regimes.hazards",
        "regimes.registry",
        "regimes.twister",
    },
    "masks": {"regimes.registry"},
    "loading.prompts": {"errors"},
    "stopwatch": set(),
    "loading.storage": {"errors"},
    "blockwise": set(),
    "wasserstein": {"errors", "wasserstein.counts", "wasserstein.ranges", "wasserstein.sorting"},
    "wasserstein.sorting": {"blockwise", "errors", "rowwise", "wasserstein.ordering"},
    "wasserstein.histogram": {"gpucode"},
    "wasserstein.counts": {"blockwise", "wasserstein.histogram", "wasserstein.sorting"},
    "wasserstein.ranges": {"blockwise", "wasserstein.counts", "wasserstein.sorting"},
    "formats": {"errors", "gpucode", "rowwise_tiles"},
    "layouts": set(),
    "sampling": {"errors"},
    # What is computed, and how: a case knows nothing of kernels, a kernel nothing of metrics.
    "cases": {"errors", "formats", "layouts"},
    "kernels": {"cases", "errors", "kernels.backward", "kernels.output", "kernels.plain", "system"},
    "kernels.output": {"cases", "errors"},
    "kernels.backward": {"cases", "errors", "formats", "kernels.output"},
    "kernels.blocked": {"cases", "kernels.backward", "kernels.results"},
    "kernels.fused": {
        "cases",
        "gpucode",
        "kernels.backward",
        "kernels.fused_refusal",
        "kernels.fused_terms",
        "kernels.fused_tiles",
        "kernels.results",
    },
    "kernels.fused_refusal": {"cases", "errors"},
    "kernels.fused_terms": {"cases"},
    "kernels.fused_tiles": set(),
    "kernels.results": set(),
    "kernels.plain": {"cases", "errors", "kernels"},
    "kernels.training": {"cases", "errors", "kernels", "kernels.output"},
    "kernels.site_list": set(),
    "kernels.stabilised": {"errors"},
    "kernels.guarded": {"cases", "errors", "formats"},
    "kernels.sites": {"errors", "formats", "kernels.site_list", "kernels.stabilised"},
    "kernels.rounder": {"cases", "formats", "kernels", "kernels.sites"},
    "kernels.emulated_forward": {
        "cases",
        "formats",
        "kernels.guarded",
        "kernels.rounder",
        "kernels.sites",
        "kernels.stabilised",
    },
    "kernels.emulated_backward": {
        "cases",
        "formats",
        "kernels",
        "kernels.emulated_forward",
        "kernels.rounder",
        "kernels.sites",
    },
    "kernels.emulated_fast": {
        "cases",
        "formats",
        "kernels.emulated_forward",
        "kernels.rounder",
        "kernels.sites",
    },
    "kernels.emulated_fast_backward": {
        "cases",
        "kernels.emulated_backward",
        "kernels.emulated_fast",
        "kernels.emulated_forward",
        "kernels.rounder",
        "kernels.sites",
    },
    "kernels.emulated_training": {
        "cases",
        "kernels.emulated_backward",
        "kernels.emulated_fast",
        "kernels.emulated_fast_backward",
        "kernels.emulated_forward",
        "kernels.rounder",
        "kernels.sites",
    },
    "kernels.emulated": {
        "cases",
        "kernels",
        "kernels.emulated_backward",
        "kernels.emulated_forward",
        "kernels.emulated_training",
        "kernels.rounder",
        "kernels.sites",
    },
    "kernels.reference": {
        "cases",
        "errors",
        "formats",
        "kernels",
        "kernels.blocked",
        "kernels.fused",
        "kernels.output",
        "kernels.results",
    },
    "kernels.key_gradients": {"cases", "kernels.backward", "kernels.blocked", "kernels.reference"},
    "kernels.baseline": {"cases", "kernels", "system"},
    "kernels.sdpa": {
        "cases",
        "errors",
        "kernels",
        "kernels.backward",
        "kernels.sdpa_claims",
        "system",
    },
    "kernels.sdpa_claims": {"cases", "kernels", "system"},
    "kernels.written": {"cases"},
    "kernels.flex": {"cases", "errors", "kernels", "kernels.flex_claims"},
    "kernels.flex_claims": {"cases", "kernels", "system"},
    "kernels.packing": {"cases"},
    "kernels.flash_attn": {
        "cases",
        "errors",
        "kernels",
        "kernels.packing",
        "kernels.sdpa_claims",
        "system",
    },
    "kernels.xformers_attention": {
        "cases",
        "errors",
        "kernels",
        "kernels.packing",
        "kernels.sdpa_claims",
        "system",
    },
    "kernels.merging": {"formats", "kernels.rounder"},
    "kernels.shards": {"cases", "errors"},
    "kernels.shard_inner": {
        "cases",
        "errors",
        "kernels",
        "kernels.emulated_backward",
        "kernels.emulated_forward",
        "kernels.merging",
        "kernels.rounder",
        "kernels.sdpa",
        "kernels.sites",
    },
    "kernels.shard_claims": {
        "cases",
        "kernels",
        "kernels.sdpa_claims",
        "kernels.shards",
        "kernels.sites",
        "system",
    },
    "kernels.sharded": {
        "cases",
        "errors",
        "formats",
        "kernels",
        "kernels.merging",
        "kernels.shard_claims",
        "kernels.shard_inner",
        "kernels.shards",
    },
    "kernels.ranks": {"errors"},
    "kernels.rank": {"kernels.ranks", "kernels.sdpa"},
    "kernels.context_parallel": {
        "cases",
        "errors",
        "kernels",
        "kernels.ranks",
        "kernels.shard_claims",
    },
    "kernels.triton_flash_options": {"cases", "errors", "kernels", "kernels.stabilised", "system"},
    "kernels.triton_flash_plan": {"cases"},
    "kernels.triton_flash_tiles": set(),
    "kernels.triton_flash_forward": {"kernels.triton_flash_tiles"},
    "kernels.triton_flash_backward": {"kernels.triton_flash_tiles"},
    "kernels.triton_flash": {
        "cases",
        "formats",
        "kernels",
        "kernels.backward",
        "kernels.triton_flash_backward",
        "kernels.triton_flash_forward",
        "kernels.triton_flash_options",
        "kernels.triton_flash_plan",
    },
    # Planted faults, and how far runs differ.
    "controls": {"cases", "errors", "formats", "kernels", "kernels.output"},
    "bits": {"arrival", "gpucode", "lazy", "rowwise_tiles"},
    "noise": {"bits", "comparison", "errors", "kernels", "lazy", "yardstick"},
    # Where kernels run: here, or in a process that may die of them.
    "meanwhile": set(),
    "arrival": set(),
    "devicetime": set(),
    "lazy": set(),
    "attempt": {"cases", "errors", "kernels", "layouts"},
    "worker": {"attempt", "cases", "errors", "formats", "kernels", "layouts"},
    "isolation": {"attempt", "cases", "errors", "kernels", "kernels.output", "worker"},
    # How far from the truth: a metric knows nothing of kernels.
    "yardstick": {"formats", "rowwise", "wasserstein"},
    "comparison": {"arrival", "formats", "lazy", "rowwise", "wasserstein", "yardstick"},
    "bias": set(),
    "intervals": set(),
    "profiles.binning": set(),
    "deviation": {"bias", "comparison", "formats", "intervals", "lazy", "yardstick"},
    "finiteness": {"cases", "comparison", "formats", "yardstick"},
    # How far it should be: the emulation a kernel claims to be, and whether it is one.
    "expectation": {
        "cases",
        "formats",
        "kernels.emulated_fast",
        "kernels.emulated_fast_backward",
        "kernels.sites",
    },
    "explaining.contributions": {"expectation", "formats", "kernels.sites"},
    "explaining.attribution": {"expectation", "explaining.contributions", "formats"},
    # What else a kernel may have computed, judged by references alone.
    "suspicion.mistakes": {"cases"},
    "suspicion.probe": {"cases", "deviation", "formats", "kernels.reference", "kernels.results"},
    "suspicion.alternatives": {
        "cases",
        "kernels.reference",
        "kernels.results",
        "suspicion.mistakes",
        "suspicion.probe",
    },
    "suspicion.factors": {"deviation", "kernels.results", "suspicion.probe"},
    "suspicion.search": {
        "cases",
        "deviation",
        "kernels.results",
        "suspicion.alternatives",
        "suspicion.factors",
        "suspicion.mistakes",
        "suspicion.probe",
    },
    # The rows that err most, and what is special about them.
    "worst.rows": {"cases", "deviation", "errors", "report", "worst.scrutiny", "worst.special"},
    "worst.scrutiny": {"cases"},
    "worst.special": {"report"},
    # A kernel by itself, feature by feature.
    "conformance.cases": {"cases", "formats", "inputs", "kernels.reference"},
    "conformance.backward": {
        "cases",
        "formats",
        "kernels",
        "kernels.output",
        "kernels.reference",
        "kernels.results",
    },
    "conformance.checking": {
        "cases",
        "conformance.backward",
        "conformance.cases",
        "deviation",
        "errors",
        "kernels",
        "kernels.reference",
        "kernels.results",
        "report",
        "suspicion.search",
        "system",
    },
    # A finding made small, and written as a bug report.
    "reproducers.reduction": {"cases", "errors", "loading.tensorwriter"},
    "reproducers.showing": {
        "attempt",
        "cases",
        "deviation",
        "errors",
        "formats",
        "gating.rules",
        "kernels",
        "kernels.reference",
    },
    "reproducers.callcode": {
        "cases",
        "errors",
        "kernels",
        "kernels.plain",
        "reproducers.functionsource",
        "reproducers.reduction",
    },
    "reproducer": {
        "cases",
        "errors",
        "kernels",
        "kernels.output",
        "loading.tensorfile",
        "loading.tensorwriter",
        "reproducers.callcode",
        "reproducers.showing",
        "system",
    },
    # Where cases come from.
    "capturing.watch": {"cases", "errors"},
    "capturing.calls": {"cases", "errors"},
    "capturing.mha": set(),
    "capturing.generation": {"errors"},
    "capturing.upstream": {"cases", "formats", "layouts", "regimes.registry", "regimes.twister"},
    "capturing.trainingstep": {"capturing.upstream", "cases", "errors"},
    "capturing.run": {
        "capturing.calls",
        "capturing.generation",
        "capturing.mha",
        "capturing.trainingstep",
        "capturing.upstream",
        "capturing.watch",
        "cases",
        "errors",
        "kernels",
    },
    "capturing.projection": {"capturing.run", "cases", "errors"},
    "loading.arguments": {"errors", "loading.prompts", "loading.storage"},
    "checkpoint": {
        "capturing.run",
        "errors",
        "loading.deferred",
        "loading.storage",
        "weights.dcp",
        "weights.dcp_metadata",
    },
    "loading.statedict": {
        "capturing.run",
        "checkpoint",
        "errors",
        "kernels",
        "loading.storage",
        "weights.dcp",
        "weights.dcp_metadata",
    },
    "loading.tensorheader": {"errors", "loading.storage"},
    "loading.tensorfile": {"cases", "errors", "loading.storage", "loading.tensorheader"},
    "loading.tensorwriter": {
        "cases",
        "errors",
        "loading.storage",
        "loading.tensorfile",
        "loading.tensorheader",
        "numdev",
    },
    "loading.reading": {
        "checkpoint",
        "config",
        "errors",
        "loading.arguments",
        "loading.prompts",
        "loading.statedict",
    },
    "loading.pipelines": {"capturing.watch", "errors", "loading.storage"},
    "capturing.denoising": {
        "capturing.run",
        "capturing.watch",
        "cases",
        "errors",
        "loading.pipelines",
    },
    "loading.varlen": {"cases", "errors", "loading.tensorwriter"},
    "sources": {
        "capturing.denoising",
        "capturing.generation",
        "capturing.projection",
        "capturing.run",
        "capturing.upstream",
        "capturing.watch",
        "cases",
        "config",
        "errors",
        "formats",
        "inputs",
        "layers",
        "layouts",
        "loading.models",
        "loading.pipelines",
        "loading.reading",
        "loading.storage",
        "loading.tensorfile",
        "masks",
        "system",
        "weights.kinds",
    },
    # What was found, and how a person sees it: no torch, no kernels, no metrics.
    "report": {
        "collector",
        "errors",
        "foreign",
        "numdev",
        "report.kinds",
        "report.record",
        "report.rows",
        "report.summaries",
        "report.sweep",
    },
    "collector": set(),
    "ahead": set(),
    "rowparts": {"ahead", "collector", "report"},
    "foreign": set(),
    "schema": {"report"},
    "profiles.summary": {"gating.rules", "report"},
    "places": {"report"},
    "summary": {
        "answer",
        "explaining.words",
        "gating.cells",
        "gating.rules",
        "places",
        "profiles.summary",
        "report",
    },
    "explaining.words": {"report"},
    "answer": {"gating.rules", "report"},
    "render": set(),
    "render.sentences": set(),
    "render.terminal": {
        "foreign",
        "render.numbers",
        "render.parts",
        "render.sentences",
        "report",
        "stopwatch",
    },
    "render.chart": {"report"},
    "render.parts": {"render.chart", "report"},
    "render.along": {"render.chart", "render.parts", "report"},
    "render.html": {
        "foreign",
        "render.along",
        "render.chart",
        "render.numbers",
        "render.parts",
        "render.positions",
        "render.sentences",
        "report",
        "stopwatch",
    },
    "render.markdown": {"foreign", "render.html", "render.sentences", "render.sheets", "report"},
    "render.numbers": set(),
    "render.positions": {"report"},
    "render.sheets": {"render.along", "render.numbers", "render.parts", "report"},
    "render.verdicts": {"gate", "render.problems", "render.standing", "render.terminal", "report"},
    "render.standing": {
        "gate",
        "gating.held",
        "gating.verdict",
        "gating.wording",
        "render.problems",
        "render.terminal",
        "report",
    },
    "render.problems": {"gating.rules", "gating.verdict", "gating.wording", "report"},
    "render.junit": {"foreign", "gating.verdict", "gating.wording", "render.problems", "report"},
    "render.github": {"foreign", "gating.verdict", "render.problems", "report"},
    "render.bounds": {"bounds.report", "render.chart", "render.sheets", "render.terminal"},
    "render.compare": {
        "comparing.comparable",
        "comparing.report",
        "render.numbers",
        "render.sheets",
        "render.terminal",
        "report",
    },
    "render.diagnosecells": {"diagnosis.guilt", "diagnosis.report"},
    "render.diagnose": {
        "diagnosis.guilt",
        "diagnosis.report",
        "render.chart",
        "render.diagnosecells",
        "render.sheets",
        "render.terminal",
        "render.train",
        "report",
    },
    "render.train": {
        "foreign",
        "render.chart",
        "render.sentences",
        "render.sheets",
        "report",
        "stopwatch",
        "training.report",
    },
    # What is decided, from the report alone, and in words.
    "gating.selecting": {"errors", "report", "yamlfile"},
    "gating.rules": {"errors", "gating.selecting", "report", "yamlfile"},
    "gating.verdict": {"report"},
    "gating.cells": {"gating.rules", "gating.selecting", "report"},
    "gating.held": {"gating.rules", "report"},
    "gating.columns": {"gating.rules", "report"},
    "gating.wholeness": {"errors", "gating.cells", "report"},
    "gating.change": {
        "comparing.comparable",
        "errors",
        "gating.cells",
        "gating.columns",
        "gating.held",
        "gating.rules",
        "report",
    },
    "gating.holding": {
        "gating.cells",
        "gating.change",
        "gating.columns",
        "gating.held",
        "gating.rules",
        "report",
    },
    "gate": {
        "errors",
        "gating.cells",
        "gating.change",
        "gating.held",
        "gating.holding",
        "gating.rules",
        "gating.selecting",
        "gating.verdict",
        "gating.wholeness",
        "report",
    },
    "gating.fitting": {
        "errors",
        "gate",
        "gating.cells",
        "gating.rules",
        "gating.verdict",
        "report",
    },
    "gating.wording": {"gating.verdict", "report"},
    "findings": {"gate", "gating.rules", "gating.verdict", "gating.wording", "report"},
    # Two audits beside each other.
    "claim": {"errors", "report"},
    "comparing.report": {"comparing.comparable", "report"},
    "comparing.comparable": {"report"},
    "comparing.movement": {"gating.rules", "report"},
    "comparing.pairing": {"comparing.comparable", "comparing.report", "report"},
    "comparing.presence": {
        "comparing.comparable",
        "comparing.movement",
        "comparing.pairing",
        "comparing.report",
        "report",
    },
    "comparing.audits": {
        "comparing.comparable",
        "comparing.movement",
        "comparing.pairing",
        "comparing.presence",
        "comparing.report",
        "report",
    },
    "comparing.words": {
        "comparing.audits",
        "comparing.comparable",
        "comparing.movement",
        "comparing.report",
        "findings",
        "gating.wording",
        "report",
    },
    # The loop.
    "execute": {"cases", "errors", "sampling"},
    "bench": {
        "attempt",
        "cases",
        "comparison",
        "deviation",
        "expectation",
        "finiteness",
        "formats",
        "kernels",
        "kernels.key_gradients",
        "kernels.output",
        "kernels.reference",
        "kernels.results",
        "meanwhile",
        "profiles.binning",
        "sampling",
        "stopwatch",
    },
    "explaining.rows": {
        "attempt",
        "bench",
        "cases",
        "errors",
        "execute",
        "expectation",
        "explaining.attribution",
        "explaining.words",
        "kernels",
        "kernels.reference",
        "kernels.results",
        "kernels.sites",
        "measuring",
        "report",
        "system",
    },
    "measuring": {
        "attempt",
        "bench",
        "beside",
        "cases",
        "bits",
        "deviation",
        "errors",
        "execute",
        "expectation",
        "explaining.undeclared",
        "finiteness",
        "formats",
        "kernels",
        "kernels.output",
        "lazy",
        "noise",
        "records",
        "report",
        "system",
    },
    # Which known way of rounding explains a kernel that declares none.
    "explaining.undeclared": {
        "attempt",
        "bench",
        "deviation",
        "errors",
        "expectation",
        "explaining.attribution",
        "formats",
        "kernels",
        "kernels.output",
        "kernels.sdpa_claims",
        "kernels.written",
        "report",
        "system",
    },
    "records": {"cases", "formats", "report"},
    "profiles.rows": {
        "bench",
        "comparison",
        "deviation",
        "execute",
        "lazy",
        "measuring",
        "profiles.binning",
        "report",
    },
    "worst.examine": {
        "bench",
        "execute",
        "expectation",
        "kernels",
        "measuring",
        "report",
        "system",
        "worst.rows",
    },
    "reproducers.making": {
        "attempt",
        "bench",
        "cases",
        "errors",
        "execute",
        "formats",
        "gating.rules",
        "jobs",
        "measuring",
        "report",
        "reproducer",
        "reproducers.reduction",
        "reproducers.showing",
        "sources",
        "system",
    },
    "loop": {
        "attempt",
        "cases",
        "collector",
        "config",
        "controls",
        "devicetime",
        "errors",
        "execute",
        "formats",
        "isolation",
        "jobs",
        "kernels",
        "loading.tensorwriter",
        "measuring",
        "meanwhile",
        "numdev",
        "records",
        "report",
        "sources",
        "stopwatch",
        "system",
    },
    "cluster.team": {
        "attempt",
        "cluster.crew",
        "cluster.remote",
        "errors",
        "jobs",
        "loading.tensorfile",
        "loop",
        "measuring",
        "sources",
        "stopwatch",
        "worker",
    },
    "jobs": {
        "attempt",
        "bench",
        "cases",
        "execute",
        "explaining.rows",
        "formats",
        "kernels",
        "measuring",
        "profiles.rows",
        "records",
        "sampling",
        "sources",
        "stopwatch",
        "system",
        "worst.examine",
    },
    "cluster.remote": {
        "attempt",
        "cases",
        "controls",
        "errors",
        "execute",
        "isolation",
        "jobs",
        "kernels",
        "loop",
        "measuring",
        "sources",
        "system",
        "worker",
    },
    "cluster.crew": {"attempt", "cluster.early", "cluster.remote", "errors", "system"},
    "sweeps.cost": {"bench", "config", "formats", "jobs", "measuring", "sources", "system"},
    # From a sweep's rows to its curves and sentences.
    "sweeps.seedmeans": set(),
    "sweeps.curves": {"config", "errors", "formats", "report", "sweeps.seedmeans"},
    "sweeps.words": {"report", "sweeps.curves", "sweeps.seedmeans"},
    # Weights: how far runs part, and what that says.
    "paired": {"blockwise", "errors", "wasserstein"},
    "weights.dcp_metadata": {"errors", "loading.storage"},
    "weights.dcp": {"errors", "loading.storage", "weights.dcp_metadata"},
    "weights.files": {
        "checkpoint",
        "config",
        "errors",
        "loading.statedict",
        "loading.storage",
        "weights.dcp",
        "weights.dcp_metadata",
    },
    "weights.kinds": set(),
    "weights.pairs": {"errors", "formats", "paired", "records"},
    "weights.report": {"report"},
    "weights.summary": {"formats", "loading.storage", "weights.pairs", "weights.report"},
    "studies.weights": {
        "errors",
        "loading.storage",
        "loop",
        "report",
        "system",
        "weights.files",
        "weights.kinds",
        "weights.pairs",
        "weights.report",
        "weights.summary",
    },
    "render.weights": {"render.sheets", "render.terminal", "weights.report"},
    "training.report": {"report"},
    "bounds.report": {"report", "training.report"},
    "diagnosis.report": {"report"},
    "diagnosis.cures": {"kernels.site_list", "kernels.sites"},
    "chain.call": {
        "capturing.projection",
        "cases",
        "chain.delta",
        "chain.nulls",
        "chain.recipe",
        "chain.similarity",
        "chain.statistics",
        "chain.ties",
        "chain.truth",
        "chain.weights",
        "diagnosis.report",
        "kernels.rounder",
        "kernels.sites",
    },
    "chain.cured": {
        "attempt",
        "chain.breaks",
        "chain.call",
        "chain.delta",
        "chain.nulls",
        "chain.recipe",
        "chain.statistics",
        "chain.truth",
        "chain.weights",
        "diagnosis.cures",
        "diagnosis.report",
        "errors",
        "kernels",
        "kernels.backward",
        "kernels.output",
        "kernels.rounder",
    },
    "chain.breaks": {"chain.recipe", "chain.truth", "kernels.emulated_forward"},
    "chain.delta": {
        "chain.recipe",
        "chain.statistics",
        "chain.truth",
        "chain.weights",
        "diagnosis.report",
    },
    "chain.nulls": {"chain.recipe", "chain.statistics", "chain.truth", "diagnosis.report"},
    "chain.recipe": {
        "cases",
        "kernels.emulated_backward",
        "kernels.emulated_forward",
        "kernels.rounder",
        "kernels.sites",
    },
    "chain.similarity": {"capturing.projection", "chain.statistics"},
    "chain.statistics": {"diagnosis.report", "formats"},
    "chain.ties": {
        "cases",
        "chain.statistics",
        "chain.truth",
        "kernels.emulated_backward",
        "kernels.emulated_forward",
        "kernels.rounder",
    },
    "chain.truth": {
        "capturing.projection",
        "cases",
        "chain.statistics",
        "chain.weights",
        "kernels.backward",
        "kernels.blocked",
        "kernels.reference",
        "kernels.results",
    },
    "chain.weights": {"capturing.projection", "chain.statistics"},
    "diagnosis.guilt": {"diagnosis.report"},
    "diagnosis.curves": {"diagnosis.guilt", "diagnosis.report", "report"},
    "diagnosis.words": {"diagnosis.curves", "diagnosis.guilt", "diagnosis.report"},
    "diagnosis.series": {
        "checkpoint",
        "errors",
        "loading.pipelines",
        "loading.storage",
        "loading.tensorfile",
        "weights.files",
    },
    "diagnosis.request": {
        "config",
        "diagnosis.series",
        "errors",
        "kernels",
        "kernels.sites",
        "yamlfile",
    },
    "bounds.saturation": {"bounds.report", "training.report"},
    "bounds.roles": {"bounds.report", "bounds.saturation", "sweeps.seedmeans", "training.report"},
    "bounds.figures": {
        "bounds.roles",
        "bounds.saturation",
        "report",
        "sweeps.seedmeans",
        "training.report",
    },
    "bounds.words": {"bounds.report", "bounds.saturation"},
    "bounds.proxies": {
        "bounds.report",
        "bounds.roles",
        "bounds.saturation",
        "bounds.words",
        "training.report",
    },
    "weights.checkpoints": {
        "bounds.roles",
        "checkpoint",
        "errors",
        "loading.statedict",
        "loading.storage",
        "paired",
        "training.report",
        "weights.dcp",
        "weights.pairs",
    },
    # Networks that learn, variant beside variant.
    "training.config": {"config", "errors", "training.report", "yamlfile"},
    "training.spikes": {"training.report"},
    "training.curves": {"report", "training.report"},
    "training.words": {"training.curves", "training.report"},
    "training": set(),
    "training.network": set(),
    "training.decoders": {"training.config", "training.network"},
    "training.denoiser": {"training.config", "training.network"},
    "training.models": {
        "training.config",
        "training.decoders",
        "training.denoiser",
        "training.network",
    },
    "training.tokenizer": {"errors"},
    "training.data": {"errors", "training.config", "training.denoiser", "training.tokenizer"},
    "training.optimiser": {"training.config"},
    "training.nulls": set(),
    "training.attention": {"cases", "kernels", "kernels.training", "training.nulls"},
    "training.lane": {
        "config",
        "errors",
        "kernels",
        "training.attention",
        "training.config",
        "training.data",
        "training.models",
        "training.network",
        "training.nulls",
        "training.optimiser",
        "training.replay",
    },
    "training.replay": {"training.network"},
    "training.measure": {"paired", "training.lane", "training.report"},
    "training.lockstep": {
        "errors",
        "training.config",
        "training.data",
        "training.lane",
        "training.measure",
        "training.report",
    },
    "training.checkpoints": {
        "errors",
        "training.config",
        "training.data",
        "training.decoders",
        "training.denoiser",
        "training.network",
        "training.tokenizer",
    },
    "training.deterministic": set(),
    "studies": set(),
    "studies.audit": {
        "cluster.crew",
        "cluster.team",
        "collector",
        "config",
        "errors",
        "execute",
        "findings",
        "jobs",
        "loading.tensorwriter",
        "loop",
        "report",
        "reproducers.making",
        "sources",
        "summary",
        "system",
        "worst.examine",
    },
    "studies.check": {
        "attempt",
        "checkcases",
        "errors",
        "execute",
        "findings",
        "gate",
        "gating.rules",
        "gating.verdict",
        "jobs",
        "kernels",
        "kernels.backward",
        "loop",
        "records",
        "report",
        "reproducers.making",
        "summary",
        "system",
    },
    "studies.compare": {
        "comparing.audits",
        "comparing.comparable",
        "comparing.presence",
        "comparing.report",
        "comparing.words",
        "errors",
        "numdev",
        "report",
        "rowparts",
    },
    "studies.bounds": {
        "bounds.figures",
        "bounds.proxies",
        "bounds.report",
        "bounds.roles",
        "errors",
        "numdev",
        "report",
        "system",
        "training.report",
        "weights.checkpoints",
    },
    "studies.diagnose": {
        "capturing.projection",
        "chain.call",
        "chain.cured",
        "diagnosis.cures",
        "diagnosis.curves",
        "diagnosis.guilt",
        "diagnosis.report",
        "diagnosis.request",
        "diagnosis.series",
        "diagnosis.words",
        "errors",
        "execute",
        "formats",
        "jobs",
        "kernels",
        "kernels.sites",
        "loading.storage",
        "loop",
        "records",
        "report",
        "sources",
        "stopwatch",
        "system",
    },
    "studies.sweep": {
        "cluster.crew",
        "cluster.team",
        "collector",
        "config",
        "execute",
        "findings",
        "formats",
        "jobs",
        "kernels",
        "loop",
        "records",
        "report",
        "reproducers.making",
        "sources",
        "sweeps.cost",
        "sweeps.curves",
        "sweeps.words",
        "system",
    },
    "studies.train": {
        "errors",
        "execute",
        "interrupt",
        "jobs",
        "kernels",
        "loop",
        "records",
        "stopwatch",
        "system",
        "training.checkpoints",
        "training.config",
        "training.curves",
        "training.data",
        "training.deterministic",
        "training.lockstep",
        "training.measure",
        "training.models",
        "training.report",
        "training.spikes",
        "training.words",
    },
    "__main__": {"cli"},
    "api": {
        "attempt",
        "bench",
        "capturing.run",
        "capturing.upstream",
        "cases",
        "commands.requests",
        "errors",
        "execute",
        "kernels",
        "measuring",
        "render.html",
        "report",
        "studies.audit",
        "system",
    },
    "loading.deferred": {"errors"},
    "loading.models": {
        "checkpoint",
        "config",
        "errors",
        "formats",
        "loading.statedict",
        "loading.streaming",
        "system",
    },
    "loading.streaming": {
        "capturing.run",
        "capturing.watch",
        "loading.deferred",
        "loading.storage",
    },
    "bounds": set(),
    "capturing": set(),
    "chain": set(),
    "cluster": set(),
    "comparing": set(),
    "conformance": set(),
    "diagnosis": set(),
    "explaining": set(),
    "gating": set(),
    "loading": set(),
    "profiles": set(),
    "regimes": set(),
    "reproducers": set(),
    "suspicion": set(),
    "sweeps": set(),
    "weights": set(),
    "worst": set(),
    "regimes.twister": {"gpucode"},
    "rowwise": {"formats", "gpucode", "rowwise_tiles"},
    "rowwise_tiles": set(),
    "gpucode": {"errors"},
    "wasserstein.ordering": {"gpucode"},
}
LIGHT = (
    *("claim", "comparing.audits", "comparing.movement", "render.compare", "studies.compare"),
    *("cli", "config", "errors", "findings", "gate", "render.html", "render.terminal"),
    *("gating.fitting", "render.standing", "rowparts"),
    *("commands.options", "commands.requests", "commands.session"),
    *(
        "diagnosis.curves",
        "diagnosis.report",
        "diagnosis.words",
        "diagnosis.guilt",
        "render.diagnose",
    ),
    *("render.bounds", "render.verdicts", "report", "gating.rules", "system"),
    *("checkwords", "pytest_plugin", "render.train"),
    *("commands.places", "render.github", "render.junit", "render.problems"),
    *("foreign", "render.markdown", "render.sheets", "schema", "commands.report"),
)
"""Modules whose import needs none of HEAVY."""
HEAVY = ("torch", "scipy", "pandas", "transformers", "numpy")


# --- the table -----------------------------------------------------------------------------------


def modules() -> dict[str, Path]:
    """Every module of the package by its name in the table."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found[name or "numdev"] = path
    return found


def imported(source: str, known: dict[str, Path], *, at_import: bool = False) -> set[str]:
    """The modules of numdev a source imports; with `at_import`, only those its import runs."""
    tree = ast.parse(source)
    nodes = _run_at_import(tree) if at_import else ast.walk(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # `from numdev import report` means the module, `from numdev.report import read` too.
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = full.removeprefix("numdev.") in known
                names.add(full if is_module else str(node.module))
    ours = {name for name in names if name.split(".")[0] == "numdev"}
    return {name.removeprefix("numdev.") for name in ours}


def _run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes outside functions and outside `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from _run_at_import(node)


def test_the_table_knows_every_module() -> None:
    """A new file must be given its place, and one that is gone loses it."""
    assert set(modules()) == set(ALLOWED)


@pytest.mark.parametrize("name", ALLOWED)
def test_a_module_imports_what_it_may(name: str) -> None:
    """No import outside the table, and no edge in it that is not there."""
    known = modules()
    found = imported(known[name].read_text(encoding="utf-8"), known)
    assert found - ALLOWED[name] == set(), "imports it may not have"
    assert ALLOWED[name] - found == set(), "edges of the table that nobody needs"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import numdev.report", {"report"}),
        ("from numdev.report import read", {"report"}),
        ("from numdev import report, errors", {"report", "errors"}),
        ("from numdev import __version__", {"numdev"}),
        ("import numdev", {"numdev"}),
        ("def f():\n    from numdev.kernels.plain import adapt", {"kernels.plain"}),
        ("def f():\n    from numdev.kernels import plain, find", {"kernels.plain", "kernels"}),
        ("if TYPE_CHECKING:\n    from numdev.config import AuditConfig", {"config"}),
        ("import torch\nfrom numdevelop import x", set()),
    ],
)
def test_imports_are_seen(source: str, expected: set[str]) -> None:
    """Every way to write an import is noticed, also inside functions."""
    assert imported(source, modules()) == expected


def test_no_cycles_at_import() -> None:
    """Modules can be imported in one order; only imports inside functions may look back."""
    known = modules()
    graph = {
        name: imported(path.read_text(encoding="utf-8"), known, at_import=True) - {"numdev"}
        for name, path in known.items()
    }
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("errors") < order.index("formats") < order.index("cases")
    assert order.index("cases") < order.index("kernels") < order.index("studies.audit")


def test_only_the_edge_imports_studies() -> None:
    """Studies import everything; nothing but the edges imports a study."""
    users = {name for name, edges in ALLOWED.items() if any("studies" in edge for edge in edges)}
    assert {name for name in users if not name.startswith("commands.")} <= {"api", "testing"}


WITHOUT_TENSORS = {
    "answer", "bounds", "checkwords", "claim", "comparing", "commands.compare", "commands.gate",
    "commands.report", "config", "diagnosis.report", "diagnosis.words", "explaining.words",
    "findings", "gate", "gating", "places", "profiles.summary", "render", "report", "rowparts",
    "schema", "studies.compare", "summary", "training.config", "training.curves",
    "training.report", "training.spikes", "training.words", "weights.report", "worst.special",
    "yamlfile",
}  # fmt: skip
"""Modules and packages that render, judge or are read: they and all they use do without torch."""


def uses_torch(source: str) -> bool:
    """Whether the source imports torch when it is imported itself."""
    for node in _run_at_import(ast.parse(source)):
        names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        if any(name.partition(".")[0] == "torch" for name in names):
            return True
    return False


def test_what_renders_or_decides_touches_no_tensor() -> None:
    """Whatever they import, near or far, also inside functions, is not torch's side."""
    known = modules()
    tensors = {name for name, path in known.items() if uses_torch(path.read_text(encoding="utf-8"))}
    assert {"cases", "formats", "bench", "kernels", "capturing.run"} <= tensors
    light = {n for n in known if {n, n.partition(".")[0]} & WITHOUT_TENSORS}
    assert {n for n in WITHOUT_TENSORS if n not in known} == set()
    assert len(light) > 70
    for name in light:
        reached, todo = set[str](), {name}
        while todo:
            reached |= todo
            # What `numdev` itself names is imported when it is asked for, and here nobody does.
            todo = {x for m in todo - {"numdev"} for x in ALLOWED[m]} - reached
        assert reached & tensors == set(), name


# --- without the heavy packages ------------------------------------------------------------------


def run_without(blocked: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, in which importing any of `blocked` fails."""
    head = f"""
        import sys

        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {blocked!r}:
                    raise ImportError(f"{{name}} is blocked in this test")

        sys.meta_path.insert(0, Blocked())
    """
    source = textwrap.dedent(head) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def run_numdev(blocked: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m numdev ARGUMENTS` without the blocked packages."""
    return run_without(
        blocked,
        f"""
        import runpy
        sys.argv = ["numdev", *{arguments!r}]
        runpy.run_module("numdev", run_name="__main__")
        """,
    )


def test_blocking_works() -> None:
    """A command that needs torch fails when torch is blocked, and says what is missing."""
    answer = run_numdev(("torch",), "kernels", "--device", "cpu")
    assert answer.returncode == 3
    assert "torch is blocked in this test" in answer.stderr


def test_help_needs_nothing_heavy_and_is_quick() -> None:
    """`numdev --help` runs without the heavy packages, in well under a second: the best of three
    runs, since others may use the machine."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        answer = run_numdev(HEAVY, "--help")
        seconds.append(time.perf_counter() - start)
        assert answer.returncode == 0, answer.stderr
        assert "audit" in answer.stdout
    assert min(seconds) < 0.7


@pytest.mark.parametrize(
    "command", ["audit", "sweep", "bounds", "compare", "diagnose", "gate", "report", "kernels"]
)
def test_help_of_every_command(command: str) -> None:
    """So does the help of each command."""
    answer = run_numdev(HEAVY, command, "--help")
    assert answer.returncode == 0, answer.stderr
    assert "Example:" in answer.stdout


def test_shell_completion_needs_nothing_heavy() -> None:
    """Completing a command line asks click alone."""
    answer = run_without(
        HEAVY,
        """
        import os
        os.environ |= {"_NUMDEV_COMPLETE": "bash_complete", "COMP_WORDS": "numdev rep",
                       "COMP_CWORD": "1"}
        from numdev.cli import cli
        cli.main(args=[], prog_name="numdev", complete_var="_NUMDEV_COMPLETE")
        """,
    )
    assert answer.stdout == "plain,report\n", answer.stderr


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules(name: str) -> None:
    """These modules can be imported where none of the heavy packages is."""
    answer = run_without(HEAVY, f"import numdev.{name}")
    assert answer.returncode == 0, answer.stderr


# --- a finished report ---------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A directory with the smallest report of an audit."""
    row = report.DeviationRow(
        case="c", source="s", module="layers.0", layer=0, call=0, seed=None, head=0,
        role="kernel", kernel="my-flash", format="bfloat16", tensor="out", status="ok", rms=1e-3,
    )  # fmt: skip
    kernel = report.KernelSummary(
        kernel="my-flash", options={}, role="kernel", format="bfloat16", ok=1, skipped=0, failed=0,
        reasons=(), ran=(), rms=1e-3, floor_ratio=1.25,
    )  # fmt: skip
    report.write(
        report.AuditReport(
            provenance=report.Provenance(
                numdev="0",
                command="numdev audit",
                created="2026-01-01T00:00:00+00:00",
                system=System(device="cpu", cpu="a laptop").as_dict(),
                source={"config": "test.yaml"},
            ),
            request={},
            summary=report.AuditSummary(answer=("Flash: near the floor",), kernels=(kernel,)),
            rows=(row,),
        ),
        tmp_path,
    )
    return tmp_path


def test_showing_a_report_needs_no_tensors(finished: Path) -> None:
    """`numdev report` shows what an audit found where there is no torch, scipy or pandas."""
    answer = run_numdev(HEAVY, "report", str(finished))
    assert answer.returncode == 0, answer.stderr
    assert "near the floor" in answer.stdout
    assert "my-flash" in answer.stdout
    assert "1.25" in answer.stdout


def test_a_report_as_json_needs_no_tensors(finished: Path) -> None:
    """`numdev report --json` gives back the report, and nothing else."""
    answer = run_numdev(HEAVY, "report", "--json", str(finished / "report.json"))
    assert answer.returncode == 0, answer.stderr
    assert report.AuditReport.model_validate_json(answer.stdout) == report.read(finished)


def test_the_gate_needs_no_tensors(finished: Path) -> None:
    """`numdev gate` decides where there is no torch, scipy, pandas or numpy. This row lacks what
    the rules need, which is no pass."""
    answer = run_numdev(HEAVY, "gate", str(finished))
    assert answer.returncode == 3, answer.stderr
    assert "NOT MEASURED" in answer.stdout
    assert answer.stderr == ""


def test_the_gate_as_json_needs_no_tensors(finished: Path) -> None:
    """Nor do its verdicts as data."""
    answer = run_numdev(HEAVY, "gate", "--json", str(finished))
    assert answer.returncode == 3, answer.stderr
    assert json.loads(answer.stdout)["outcome"] == "unmeasured"
