"""What numdev knows of reports of training runs, of bounds, and of sets of weights."""

from __future__ import annotations

from numdev.report_kinds import Kind
from numdev.studies.training import view as train_view
from numdev.studies.training.bounds import view as bounds_view
from numdev.studies.training.bounds.report import BoundsReport
from numdev.studies.training.report import TrainReport
from numdev.studies.training.weights import view as weights_view
from numdev.studies.training.weights.report import WeightsReport

TRAIN = Kind(report=TrainReport, blocks=train_view.blocks, styles=train_view.styles)
BOUNDS = Kind(report=BoundsReport, blocks=bounds_view.blocks, styles=bounds_view.styles)
WEIGHTS = Kind(report=WeightsReport, blocks=weights_view.blocks)
