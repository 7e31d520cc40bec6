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
    "numdev": {"api", "kernels", "testing", "varlen"},
    "testing": {
        "cases",
        "checkcases",
        "checkwords",
        "config",
        "errors",
        "functionsource",
        "kernels",
        "kernels.plain",
        "report",
        "rules",
        "studies.check",
        "system",
        "verdict",
    },
    "pytest_plugin": {"config", "render.html", "report", "testing"},
    "checkwords": {"foreign", "report", "verdict", "wording"},
    "functionsource": {"errors"},
    "checkcases": {"cases", "config", "errors", "inputs", "sources", "tensorfile", "upstream"},
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
        "errors",
        "numdev",
    },
    "commands": set(),
    "commands.options": set(),
    "commands.places": {
        "errors",
        "render.github",
        "render.junit",
        "render.problems",
        "report",
        "rules",
        "verdict",
    },
    "commands.requests": {"config", "errors"},
    "commands.session": {
        "errors",
        "foreign",
        "interrupt",
        "render.html",
        "render.terminal",
        "report",
    },
    "commands.audit": {
        "commands.options",
        "commands.requests",
        "commands.session",
        "crew",
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
        "diagnoseconfig",
        "execute",
        "studies.diagnose",
    },
    "commands.gate": {
        "cells",
        "collector",
        "commands.places",
        "config",
        "errors",
        "findings",
        "fitting",
        "gate",
        "render.verdicts",
        "report",
        "rowparts",
        "rules",
    },
    "commands.kernels": {"conformance", "foreign", "kernels", "render.terminal", "system"},
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
        "commands.options",
        "commands.requests",
        "commands.session",
        "crew",
        "execute",
        "studies.sweep",
    },
    "commands.train": {
        "commands.options",
        "commands.session",
        "config",
        "execute",
        "studies.train",
        "trainconfig",
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
    "config": {"errors"},
    "regimes": {"cases"},
    "exact": {"cases", "regimes"},
    "hazards": {"regimes"},
    "constructed": {"formats", "regimes"},
    "inputs": {"cases", "constructed", "errors", "exact", "hazards", "regimes"},
    "masks": {"regimes"},
    "prompts": {"errors"},
    "stopwatch": set(),
    "storage": {"errors"},
    "blockwise": set(),
    "wasserstein": {"errors", "wasserstein_counts", "wasserstein_ranges", "wasserstein_sorted"},
    "wasserstein_sorted": {"blockwise", "errors"},
    "wasserstein_counts": {"blockwise", "wasserstein_sorted"},
    "wasserstein_ranges": {"blockwise", "wasserstein_counts", "wasserstein_sorted"},
    "formats": {"errors"},
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
        "errors",
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
    "checksum": set(),
    "noise": {"comparison", "errors", "kernels", "yardstick"},
    # Where kernels run: here, or in a process that may die of them.
    "attempt": {"cases", "errors", "kernels", "layouts"},
    "worker": {"attempt", "cases", "errors", "formats", "kernels", "layouts"},
    "isolation": {"attempt", "cases", "errors", "kernels", "kernels.output", "worker"},
    # How far from the truth: a metric knows nothing of kernels.
    "yardstick": {"formats", "wasserstein"},
    "comparison": {"formats", "wasserstein", "yardstick"},
    "bias": set(),
    "intervals": set(),
    "binning": set(),
    "deviation": {"bias", "comparison", "intervals", "yardstick"},
    "finiteness": {"cases", "comparison", "formats", "yardstick"},
    # How far it should be: the emulation a kernel claims to be, and whether it is one.
    "expectation": {
        "cases",
        "formats",
        "kernels.emulated_fast",
        "kernels.emulated_fast_backward",
        "kernels.sites",
    },
    "contributions": {"expectation", "formats", "kernels.sites"},
    "attribution": {"contributions", "expectation", "formats"},
    # What else a kernel may have computed, judged by references alone.
    "mistakes": {"cases"},
    "probe": {"cases", "deviation", "formats", "kernels.reference", "kernels.results"},
    "alternatives": {"cases", "kernels.reference", "kernels.results", "mistakes", "probe"},
    "factors": {"deviation", "kernels.results", "probe"},
    "suspicion": {
        "alternatives",
        "cases",
        "deviation",
        "factors",
        "kernels.results",
        "mistakes",
        "probe",
    },
    # The rows that err most, and what is special about them.
    "worst": {"cases", "deviation", "errors", "report", "scrutiny", "special"},
    "scrutiny": {"cases"},
    "special": {"report"},
    # A kernel by itself, feature by feature.
    "conformance_cases": {"cases", "formats", "inputs", "kernels.reference"},
    "conformance_backward": {
        "cases",
        "formats",
        "kernels",
        "kernels.output",
        "kernels.reference",
        "kernels.results",
    },
    "conformance": {
        "cases",
        "conformance_backward",
        "conformance_cases",
        "deviation",
        "errors",
        "kernels",
        "kernels.reference",
        "kernels.results",
        "report",
        "suspicion",
        "system",
    },
    # A finding made small, and written as a bug report.
    "reduction": {"cases", "errors", "tensorwriter"},
    "showing": {
        "attempt",
        "cases",
        "deviation",
        "errors",
        "formats",
        "kernels",
        "kernels.reference",
        "rules",
    },
    "callcode": {"cases", "errors", "functionsource", "kernels", "kernels.plain", "reduction"},
    "reproducer": {
        "callcode",
        "cases",
        "errors",
        "kernels",
        "kernels.output",
        "showing",
        "system",
        "tensorfile",
        "tensorwriter",
    },
    # Where cases come from.
    "watch": {"cases", "errors"},
    "calls": {"cases", "errors"},
    "mha": set(),
    "generation": {"errors"},
    "upstream": {"cases", "formats", "layouts", "regimes"},
    "trainingstep": {"cases", "errors", "upstream"},
    "capturing": {
        "calls",
        "cases",
        "errors",
        "generation",
        "kernels",
        "mha",
        "trainingstep",
        "upstream",
        "watch",
    },
    "projection": {"capturing", "cases", "errors"},
    "arguments": {"errors", "prompts", "storage"},
    "checkpoint": {"capturing", "deferred", "distmetadata", "distweights", "errors", "storage"},
    "statedict": {
        "capturing",
        "checkpoint",
        "distmetadata",
        "distweights",
        "errors",
        "kernels",
        "storage",
    },
    "tensorheader": {"errors", "storage"},
    "tensorfile": {"cases", "errors", "storage", "tensorheader"},
    "tensorwriter": {"cases", "errors", "numdev", "storage", "tensorfile", "tensorheader"},
    "reading": {"arguments", "checkpoint", "config", "errors", "prompts", "statedict"},
    "pipelines": {"errors", "storage", "watch"},
    "denoising": {"capturing", "cases", "errors", "pipelines", "watch"},
    "varlen": {"cases", "errors", "tensorwriter"},
    "sources": {
        "capturing",
        "cases",
        "config",
        "denoising",
        "errors",
        "formats",
        "generation",
        "inputs",
        "layouts",
        "loading",
        "masks",
        "pipelines",
        "projection",
        "reading",
        "storage",
        "system",
        "tensorfile",
        "upstream",
        "watch",
        "weightkinds",
    },
    # What was found, and how a person sees it: no torch, no kernels, no metrics.
    "report": {"collector", "errors", "foreign", "numdev"},
    "collector": set(),
    "rowparts": {"collector", "report"},
    "foreign": set(),
    "schema": {"report"},
    "profiles": {"report", "rules"},
    "summary": {"answer", "explanations", "profiles", "report", "rules"},
    "explanations": {"report"},
    "answer": {"report", "rules"},
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
        "held",
        "render.problems",
        "render.terminal",
        "report",
        "verdict",
        "wording",
    },
    "render.problems": {"report", "rules", "verdict", "wording"},
    "render.junit": {"foreign", "render.problems", "report", "verdict", "wording"},
    "render.github": {"foreign", "render.problems", "report", "verdict"},
    "render.bounds": {"boundsreport", "render.chart", "render.sheets", "render.terminal"},
    "render.compare": {
        "comparable",
        "comparereport",
        "render.numbers",
        "render.sheets",
        "render.terminal",
        "report",
    },
    "render.diagnosecells": {"diagnosereport", "guilt"},
    "render.diagnose": {
        "diagnosereport",
        "guilt",
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
        "trainreport",
    },
    # What is decided, from the report alone, and in words.
    "selecting": {"config", "errors", "report"},
    "rules": {"config", "errors", "report", "selecting"},
    "verdict": {"report"},
    "cells": {"report", "rules", "selecting"},
    "held": {"report", "rules"},
    "columns": {"report", "rules"},
    "wholeness": {"cells", "errors", "report"},
    "change": {"cells", "columns", "comparable", "errors", "held", "report", "rules"},
    "holding": {"cells", "change", "columns", "held", "report", "rules"},
    "gate": {
        "cells",
        "change",
        "errors",
        "held",
        "holding",
        "report",
        "rules",
        "selecting",
        "verdict",
        "wholeness",
    },
    "fitting": {"cells", "errors", "gate", "report", "rules", "verdict"},
    "wording": {"report", "verdict"},
    "findings": {"gate", "report", "rules", "verdict", "wording"},
    # Two audits beside each other.
    "claim": {"errors", "report"},
    "comparereport": {"comparable", "report"},
    "comparable": {"report"},
    "movement": {"report", "rules"},
    "pairing": {"comparable", "comparereport", "report"},
    "presence": {"comparable", "comparereport", "movement", "pairing", "report"},
    "compare": {"comparable", "comparereport", "movement", "pairing", "presence", "report"},
    "comparewords": {
        "comparable",
        "compare",
        "comparereport",
        "findings",
        "movement",
        "report",
        "wording",
    },
    # The loop.
    "execute": {"cases", "errors", "sampling"},
    "bench": {
        "attempt",
        "binning",
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
        "sampling",
        "stopwatch",
    },
    "explain": {
        "attempt",
        "attribution",
        "bench",
        "cases",
        "errors",
        "execute",
        "expectation",
        "explanations",
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
        "cases",
        "checksum",
        "comparison",
        "deviation",
        "errors",
        "execute",
        "expectation",
        "finiteness",
        "formats",
        "kernels",
        "kernels.output",
        "noise",
        "records",
        "report",
        "suspicion",
        "system",
        "undeclared",
    },
    # Which known way of rounding explains a kernel that declares none.
    "undeclared": {
        "attempt",
        "attribution",
        "bench",
        "deviation",
        "errors",
        "expectation",
        "formats",
        "kernels",
        "kernels.output",
        "kernels.sdpa_claims",
        "kernels.written",
        "report",
        "system",
    },
    "records": {"cases", "formats", "report"},
    "profiling": {"bench", "binning", "comparison", "execute", "report"},
    "examine": {
        "bench",
        "execute",
        "expectation",
        "kernels",
        "measuring",
        "report",
        "system",
        "worst",
    },
    "reproducing": {
        "attempt",
        "bench",
        "cases",
        "errors",
        "execute",
        "formats",
        "jobs",
        "measuring",
        "reduction",
        "report",
        "reproducer",
        "rules",
        "showing",
        "sources",
        "system",
    },
    "loop": {
        "attempt",
        "cases",
        "config",
        "controls",
        "errors",
        "execute",
        "formats",
        "isolation",
        "jobs",
        "kernels",
        "measuring",
        "numdev",
        "records",
        "report",
        "sources",
        "stopwatch",
        "system",
        "tensorwriter",
    },
    "cluster": {
        "attempt",
        "crew",
        "errors",
        "jobs",
        "loop",
        "measuring",
        "remote",
        "sources",
        "stopwatch",
        "tensorfile",
        "worker",
    },
    "jobs": {
        "attempt",
        "bench",
        "cases",
        "examine",
        "execute",
        "explain",
        "formats",
        "kernels",
        "measuring",
        "profiling",
        "records",
        "sampling",
        "sources",
        "stopwatch",
        "system",
    },
    "remote": {
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
    "crew": {"attempt", "errors", "remote", "system"},
    "cost": {"bench", "config", "formats", "jobs", "measuring", "sources", "system"},
    # From a sweep's rows to its curves and sentences.
    "seedmeans": set(),
    "curves": {"config", "errors", "formats", "report", "seedmeans"},
    "trends": {"curves", "report", "seedmeans"},
    # Weights: how far runs part, and what that says.
    "paired": {"blockwise", "errors", "wasserstein"},
    "distmetadata": {"errors", "storage"},
    "distweights": {"distmetadata", "errors", "storage"},
    "weightfiles": {
        "checkpoint",
        "config",
        "distmetadata",
        "distweights",
        "errors",
        "statedict",
        "storage",
    },
    "weightkinds": set(),
    "weightpairs": {"errors", "formats", "paired", "records"},
    "weightreport": {"report"},
    "weightsummary": {"formats", "storage", "weightpairs", "weightreport"},
    "studies.weights": {
        "errors",
        "loop",
        "report",
        "storage",
        "system",
        "weightfiles",
        "weightkinds",
        "weightpairs",
        "weightreport",
        "weightsummary",
    },
    "render.weights": {"render.sheets", "render.terminal", "weightreport"},
    "trainreport": {"report"},
    "boundsreport": {"report", "trainreport"},
    "diagnosereport": {"report"},
    "cures": {"kernels.site_list", "kernels.sites"},
    "chain": {
        "cases",
        "chain_delta",
        "chain_nulls",
        "chain_recipe",
        "chain_similarity",
        "chain_statistics",
        "chain_ties",
        "chain_truth",
        "chain_weights",
        "diagnosereport",
        "kernels.rounder",
        "kernels.sites",
        "projection",
    },
    "chain_cures": {
        "attempt",
        "chain",
        "chain_breaks",
        "chain_delta",
        "chain_nulls",
        "chain_recipe",
        "chain_statistics",
        "chain_truth",
        "chain_weights",
        "cures",
        "diagnosereport",
        "errors",
        "kernels",
        "kernels.backward",
        "kernels.output",
        "kernels.rounder",
    },
    "chain_breaks": {"chain_recipe", "chain_truth", "kernels.emulated_forward"},
    "chain_delta": {
        "chain_recipe",
        "chain_statistics",
        "chain_truth",
        "chain_weights",
        "diagnosereport",
    },
    "chain_nulls": {"chain_recipe", "chain_statistics", "chain_truth", "diagnosereport"},
    "chain_recipe": {
        "cases",
        "kernels.emulated_backward",
        "kernels.emulated_forward",
        "kernels.rounder",
        "kernels.sites",
    },
    "chain_similarity": {"chain_statistics", "projection"},
    "chain_statistics": {"diagnosereport", "formats"},
    "chain_ties": {
        "cases",
        "chain_statistics",
        "chain_truth",
        "kernels.emulated_backward",
        "kernels.emulated_forward",
        "kernels.rounder",
    },
    "chain_truth": {
        "cases",
        "chain_statistics",
        "chain_weights",
        "kernels.backward",
        "kernels.blocked",
        "kernels.reference",
        "kernels.results",
        "projection",
    },
    "chain_weights": {"chain_statistics", "projection"},
    "guilt": {"diagnosereport"},
    "diagnosecurves": {"diagnosereport", "guilt", "report"},
    "diagnosewords": {"diagnosecurves", "diagnosereport", "guilt"},
    "series": {"checkpoint", "errors", "pipelines", "storage", "tensorfile", "weightfiles"},
    "diagnoseconfig": {"config", "errors", "kernels", "kernels.sites", "series"},
    "saturation": {"boundsreport", "trainreport"},
    "bounds": {"boundsreport", "saturation", "seedmeans", "trainreport"},
    "boundsfigures": {"bounds", "report", "saturation", "seedmeans", "trainreport"},
    "boundswords": {"boundsreport", "saturation"},
    "proxies": {"bounds", "boundsreport", "boundswords", "saturation", "trainreport"},
    "checkpointpairs": {
        "bounds",
        "checkpoint",
        "distweights",
        "errors",
        "paired",
        "statedict",
        "storage",
        "trainreport",
        "weightpairs",
    },
    # Networks that learn, variant beside variant.
    "trainconfig": {"config", "errors", "trainreport"},
    "trainspikes": {"trainreport"},
    "traincurves": {"report", "trainreport"},
    "trainwords": {"traincurves", "trainreport"},
    "training": set(),
    "training.network": set(),
    "training.decoders": {"trainconfig", "training.network"},
    "training.denoiser": {"trainconfig", "training.network"},
    "training.models": {
        "trainconfig",
        "training.decoders",
        "training.denoiser",
        "training.network",
    },
    "training.tokenizer": {"errors"},
    "training.data": {"errors", "trainconfig", "training.denoiser", "training.tokenizer"},
    "training.optimiser": {"trainconfig"},
    "training.nulls": set(),
    "training.attention": {"cases", "kernels", "kernels.training", "training.nulls"},
    "training.lane": {
        "config",
        "errors",
        "kernels",
        "trainconfig",
        "training.attention",
        "training.data",
        "training.models",
        "training.network",
        "training.nulls",
        "training.optimiser",
        "training.replay",
    },
    "training.replay": {"training.network"},
    "training.measure": {"paired", "training.lane", "trainreport"},
    "training.lockstep": {
        "errors",
        "trainconfig",
        "training.data",
        "training.lane",
        "training.measure",
        "trainreport",
    },
    "training.checkpoints": {
        "errors",
        "trainconfig",
        "training.data",
        "training.decoders",
        "training.denoiser",
        "training.network",
        "training.tokenizer",
    },
    "training.deterministic": set(),
    "studies": set(),
    "studies.audit": {
        "cluster",
        "config",
        "crew",
        "errors",
        "examine",
        "execute",
        "findings",
        "jobs",
        "loop",
        "report",
        "reproducing",
        "sources",
        "summary",
        "system",
        "tensorwriter",
    },
    "studies.check": {
        "attempt",
        "checkcases",
        "errors",
        "execute",
        "findings",
        "gate",
        "jobs",
        "kernels",
        "kernels.backward",
        "loop",
        "records",
        "report",
        "reproducing",
        "rules",
        "summary",
        "system",
        "verdict",
    },
    "studies.compare": {
        "comparable",
        "compare",
        "comparereport",
        "comparewords",
        "errors",
        "numdev",
        "presence",
        "report",
        "rowparts",
    },
    "studies.bounds": {
        "bounds",
        "boundsfigures",
        "boundsreport",
        "checkpointpairs",
        "errors",
        "numdev",
        "proxies",
        "report",
        "system",
        "trainreport",
    },
    "studies.diagnose": {
        "chain",
        "chain_cures",
        "cures",
        "diagnoseconfig",
        "diagnosecurves",
        "diagnosereport",
        "diagnosewords",
        "errors",
        "execute",
        "formats",
        "guilt",
        "jobs",
        "kernels",
        "kernels.sites",
        "loop",
        "projection",
        "records",
        "report",
        "series",
        "sources",
        "stopwatch",
        "storage",
        "system",
    },
    "studies.sweep": {
        "cluster",
        "config",
        "cost",
        "crew",
        "curves",
        "execute",
        "findings",
        "formats",
        "jobs",
        "kernels",
        "loop",
        "records",
        "report",
        "reproducing",
        "sources",
        "system",
        "trends",
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
        "trainconfig",
        "traincurves",
        "training.checkpoints",
        "training.data",
        "training.deterministic",
        "training.lockstep",
        "training.measure",
        "training.models",
        "trainreport",
        "trainspikes",
        "trainwords",
    },
    "__main__": {"cli"},
    "api": {
        "attempt",
        "bench",
        "capturing",
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
        "upstream",
    },
    "deferred": {"errors"},
    "loading": {"checkpoint", "config", "errors", "formats", "statedict", "streaming", "system"},
    "streaming": {"capturing", "deferred", "storage", "watch"},
}
LIGHT = (
    *("claim", "compare", "movement", "render.compare", "studies.compare"),
    *("cli", "config", "errors", "findings", "gate", "render.html", "render.terminal"),
    *("fitting", "render.standing", "rowparts"),
    *("commands.options", "commands.requests", "commands.session"),
    *("diagnosecurves", "diagnosereport", "diagnosewords", "guilt", "render.diagnose"),
    *("render.bounds", "render.verdicts", "report", "rules", "system"),
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


def test_what_renders_or_decides_touches_no_tensor() -> None:
    """Whatever the report, the renderers and the gate import, near or far, is not torch's side."""
    tensors = {"arguments", "bench", "calls", "capturing", "cases", "checkpoint", "deviation"}
    tensors |= {"execute", "formats", "inputs", "kernels", "prompts", "sources", "watch"}
    tensors |= {"constructed", "exact", "hazards", "layouts", "masks", "regimes", "wasserstein"}
    light = {"report", "answer", "rules", "verdict", "gate", "wording", "findings"}
    light |= {"checkwords", "diagnosereport", "render.bounds"}
    light |= {"claim", "comparable", "compare", "comparereport", "comparewords", "movement"}
    light |= {"pairing", "presence", "render.compare", "studies.compare"}
    light |= {"fitting", "render.standing", "rowparts", "columns", "wholeness"}
    light |= {
        "boundsreport",
        "saturation",
        "bounds",
        "boundsfigures",
        "proxies",
        "boundswords",
    }
    light |= {
        "profiles",
        "render.along",
        "render.chart",
        "render.html",
        "render.parts",
        "render.terminal",
        "render.verdicts",
        "explanations",
    }
    light |= {"render.train", "trainreport", "traincurves", "trainwords", "trainspikes"}
    light |= {"render.github", "render.junit", "render.problems"}
    for name in ALLOWED.keys() & light:
        reached, todo = set[str](), {name}
        while todo:
            reached |= todo
            # What `numdev` itself names is imported when it is asked for, and here nobody does.
            todo = {x for m in todo - {"numdev"} for x in ALLOWED[m]} - reached
        assert not reached & tensors, name


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
