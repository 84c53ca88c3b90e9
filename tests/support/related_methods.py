"""Related methods that are combined in tests."""

from dataclasses import dataclass

from pacs_trl.experimental.dars import DARSConfig, DARSTrainer
from pacs_trl.experimental.guidance import GuidanceConfig, GuidanceTrainer
from pacs_trl.experimental.steer import STEERConfig, STEERTrainer
from pacs_trl.experimental.verl import VERLConfig, VERLTrainer


@dataclass
class SteerAndVerlConfig(STEERConfig, VERLConfig):
    """Two methods at once."""


class SteerAndVerlTrainer(STEERTrainer, VERLTrainer):
    """Methods that override different extension points combine as classes do."""

    _config_class = SteerAndVerlConfig


@dataclass
class DarsAndGuidanceConfig(DARSConfig, GuidanceConfig):
    """Guided attempts, then more completions of hard prompts."""


class DarsAndGuidanceTrainer(DARSTrainer, GuidanceTrainer):
    """Methods that change the same generation, one after the other."""

    _config_class = DarsAndGuidanceConfig
