"""What explains a model, written beside its weights: results, recipe, training curves, and the card.

The same whoever writes it, the trainer that has saved the model or `pacs-trl push`, because all of it is made from what lies in the
directory. What may not leave this machine is left out where it would: in the card, and of the other files when they are uploaded.
"""

import json
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from ..evaluation.provenance import checkpoint_digest
from ..redaction import published
from ..report.inputs import read_described, read_log_history, read_training_facts
from ..settings import read_mapping
from .files import (
    LOG_FILE,
    README_FILE,
    RECIPE_FILE,
    RESULTS_FILE,
    TRAINING_FACTS_FILE,
    TRAINING_FIGURE,
    WEIGHTS,
)
from .model_card import CardInputs, build_card, hub_evaluations
from .readme import HandWritten, with_our_part


logger = logging.getLogger(__name__)

MIN_LOGGED = 5  # fewer steps are no curve


def describe(
    model_dir: Path, name: str, kept: HandWritten, *, results: Path | None = None, recipe: Path | None = None
) -> None:
    """
    Write card, evaluation metadata and training figure into a checkpoint directory, and take results and recipe along.

    Args:
        model_dir (`Path`): Checkpoint directory.
        name (`str`): `USER/NAME` on the Hub, or a name for the title.
        kept ([`HandWritten`]): What was written by hand in the README, see [`kept_readme`].
        results (`Path`, *optional*): Results file to take along; `results.json` of the directory if left out.
        recipe (`Path`, *optional*): Recipe to take along; `recipe.yaml` of the directory if left out.

    Raises:
        `ValueError`: if a file that goes into the card cannot be read.
    """
    if results is not None:
        content = json.dumps(published(read_described(results)), indent=1) + "\n"
        (model_dir / RESULTS_FILE).write_text(content, encoding="utf-8")
    if recipe is not None and recipe_file(recipe).resolve() != (model_dir / RECIPE_FILE).resolve():
        settings = published(read_mapping(recipe_file(recipe), "recipe"))
        (model_dir / RECIPE_FILE).write_text(yaml.safe_dump(settings, allow_unicode=True), encoding="utf-8")
    _draw_training(model_dir)
    inputs = card_inputs(model_dir)
    for file, content in hub_evaluations(inputs.results or {"benchmarks": {}}).items():
        (model_dir / file).parent.mkdir(exist_ok=True)
        (model_dir / file).write_text(content, encoding="utf-8")
    card = build_card(name, inputs)
    (model_dir / README_FILE).write_text(with_our_part(kept, card), encoding="utf-8")


def described_files(model_dir: Path, results: Path | None, recipe: Path | None) -> list[str]:
    """What [`describe`] would add, without writing it."""
    added = [README_FILE]
    if results is not None or (model_dir / RESULTS_FILE).is_file():
        added += [RESULTS_FILE, *hub_evaluations(read_described(results or model_dir / RESULTS_FILE))]
    return (
        added
        + [RECIPE_FILE] * (recipe is not None)
        + [TRAINING_FIGURE] * bool(find_spec("matplotlib") and _log_history(model_dir))
    )


def card_inputs(model_dir: Path) -> CardInputs:
    """What a checkpoint directory holds for its card: results.json of these weights, recipe.yaml, provenance.json and the
    training figure, where present."""
    results, recipe, training = (model_dir / name for name in (RESULTS_FILE, RECIPE_FILE, TRAINING_FACTS_FILE))
    measured = published(read_described(results)) if results.is_file() else None
    if measured is not None and _other_weights(measured, model_dir):
        measured = None  # of an earlier model in this directory
    return CardInputs(
        results=measured,
        recipe=read_mapping(recipe, "recipe") if recipe.is_file() else None,
        training=read_training_facts(training) if training.is_file() else None,
        is_adapter=(model_dir / "adapter_config.json").is_file(),
        has_training_figure=(model_dir / TRAINING_FIGURE).is_file(),
    )


def check_checkpoint(model_dir: Path) -> None:
    """
    Raises:
        `ValueError`: if the directory has no configuration or no weights.
    """
    if not model_dir.is_dir():
        raise ValueError(f"The model directory {model_dir} does not exist.")
    has_config = any((model_dir / name).is_file() for name in ("config.json", "adapter_config.json"))
    if not has_config or not any(list(model_dir.glob(pattern)) for pattern in WEIGHTS):
        raise ValueError(
            f"{model_dir} does not look like a saved model: it needs a config.json (or adapter_config.json) and "
            f"{' or '.join(WEIGHTS)} files. Push the directory of one checkpoint."
        )


def check_described(model_dir: Path, results: Path | None, recipe: Path | None) -> None:
    """
    Everything that can be wrong with the files, before any is written.

    Raises:
        `ValueError`: if one of them cannot be read, or the results (by default those in the directory) were measured on other
            weights.
    """
    path = results or model_dir / RESULTS_FILE
    if results is not None or path.is_file():
        measured = read_described(path)
        if _other_weights(measured, model_dir):
            raise ValueError(
                f"{path} was measured on a checkpoint with digest {measured['model']['digest']}, but {model_dir} has "
                f"{checkpoint_digest(model_dir)}: these are not the scores of these weights. Evaluate this checkpoint, or push "
                "the one that was evaluated."
            )
    if recipe is not None:
        read_mapping(recipe_file(recipe), "recipe")
    card_inputs(model_dir)
    _log_history(model_dir)


def recipe_file(recipe: Path) -> Path:
    """The file, of which the directory may be given."""
    return recipe / RECIPE_FILE if recipe.is_dir() else recipe


def _other_weights(results: dict[str, Any], model_dir: Path) -> bool:
    measured = results["model"].get("digest")
    return measured is not None and measured != checkpoint_digest(model_dir)


def _log_history(model_dir: Path) -> list[dict[str, Any]]:
    state = model_dir / LOG_FILE
    history = read_log_history(state) if state.is_file() else []
    return history if sum("reward" in log for log in history) >= MIN_LOGGED else []


def _draw_training(model_dir: Path) -> None:
    """Draw the training curves of `trainer_state.json`, if it holds any and matplotlib is installed."""
    history = _log_history(model_dir)
    if not history:
        return
    if find_spec("matplotlib") is None:
        logger.warning("Training curves are left out of the card: matplotlib is not installed (extra `report`).")
        return
    from ..report import plots

    png, svg = plots.training_figure({"": {"training": [history]}}, model_dir / Path(TRAINING_FIGURE).stem)
    svg.unlink()
    assert png.name == TRAINING_FIGURE
