"""`pacs-trl push`, and `push_to_hub: true`: a checkpoint with its card, recipe, results and training curves to the Hub.

First the files that travel with the weights are written into the checkpoint directory (`prepare`), then the directory is
uploaded. The upload goes through huggingface_hub: it skips files that are already there, so an interrupted push is
resumed by running the command again, and errors that can pass are retried here. A trainer that has just finished
leaves its log and circumstances beside the weights (`record_training`) and pushes in the same way (`push_trained`).
"""

import argparse
import json
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from pacs_trl.evaluation.provenance import checkpoint_digest, training_facts
from pacs_trl.evaluation.results import read_results
from pacs_trl.report.model_card import (
    RECIPE_FILE,
    TRAINING_FACTS_FILE,
    TRAINING_FIGURE,
    CardInputs,
    build_card,
    hub_evaluations,
)


logger = logging.getLogger(__name__)

# What a training run leaves beside the weights and nobody needs for using the model.
NOT_UPLOADED = (
    "checkpoint-*/**",
    "runs/**",
    "run_id",
    "completions/**",
    "samples/**",
    "evaluations/**",
    "optimizer*",
    "scheduler.pt",
    "rng_state*",
    "global_step*/**",
    "training_args.bin",  # a pickle of every setting of the run, the token included
    "*.tmp",
    "_*",
)
WEIGHTS = ("*.safetensors", "*.bin")
# A setting of transformers that must never be published with a recipe.
TOKEN_KEY = "hub_token"
PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)


class PushResult(NamedTuple):
    """`url` of the repository (None for a dry run), the files that belong to the push, and how often it was retried."""

    url: str | None
    files: list[str]
    num_retries: int


def prepare(model_dir: Path, repo_id: str, *, results: Path | None = None, recipe: Path | None = None) -> list[Path]:
    """
    Write card, results, evaluation metadata, recipe and training figure into a checkpoint directory.

    Args:
        model_dir (`Path`): Checkpoint directory.
        repo_id (`str`): `USER/NAME`; the name becomes the title of the card.
        results (`Path`, *optional*): Results file to take along; `results.json` of the directory if left out.
        recipe (`Path`, *optional*): Recipe to take along; `recipe.yaml` of the directory if left out.

    Returns:
        `list[Path]`: The files written or taken along.

    Raises:
        `ValueError`: if the directory has no model, a named file cannot be read, or the recipe holds a token.
    """
    check_checkpoint(model_dir)
    check_results(model_dir, results)
    check_recipe(model_dir, recipe)
    written = []
    for given, name in ((results, "results.json"), (recipe, RECIPE_FILE)):
        target = model_dir / name
        if given is not None:
            given = given / name if given.is_dir() else given
            if not given.is_file():
                raise ValueError(f"{given} does not exist.")
            if given.resolve() != target.resolve():
                shutil.copyfile(given, target)
        if target.is_file():
            written.append(target)
    has_figure = _draw_training(model_dir)
    if has_figure:
        written.append(model_dir / TRAINING_FIGURE)
    inputs = card_inputs(model_dir)._replace(has_training_figure=has_figure)
    if inputs.results:
        for name, content in hub_evaluations(inputs.results).items():
            (model_dir / name).parent.mkdir(exist_ok=True)
            (model_dir / name).write_text(content, encoding="utf-8")
            written.append(model_dir / name)
    build_card(repo_id.split("/")[-1], inputs).save(model_dir / "README.md")
    return [*written, model_dir / "README.md"]


def card_inputs(model_dir: Path) -> CardInputs:
    """What a checkpoint directory holds for its card: results.json, recipe.yaml, provenance.json and the training figure,
    where present."""
    results, recipe, training = (model_dir / name for name in ("results.json", RECIPE_FILE, TRAINING_FACTS_FILE))
    return CardInputs(
        results=read_results(results) if results.is_file() else None,
        recipe=yaml.safe_load(recipe.read_text(encoding="utf-8")) if recipe.is_file() else None,
        training=json.loads(training.read_text(encoding="utf-8")) if training.is_file() else None,
        is_adapter=(model_dir / "adapter_config.json").is_file(),
        has_training_figure=(model_dir / TRAINING_FIGURE).is_file(),
    )


def push(
    model_dir: Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    results: Path | None = None,
    recipe: Path | None = None,
    dry_run: bool = False,
    max_attempts: int = 5,
    first_wait_seconds: float = 2.0,
    api: HfApi | None = None,
) -> PushResult:
    """
    Upload a checkpoint with everything that explains it.

    Args:
        model_dir (`Path`): Checkpoint directory.
        repo_id (`str`): `USER/NAME`; created if it does not exist.
        private (`bool`): Whether a new repository is private.
        revision (`str`, *optional*): Branch; the main one if left out.
        results, recipe (`Path`, *optional*): See [`prepare`].
        dry_run (`bool`): Only say what would be uploaded: nothing is written and no connection is made.
        max_attempts (`int`): Attempts before giving up; what earlier attempts uploaded is not sent again.
        first_wait_seconds (`float`): Wait before the second attempt, doubled after each.
        api ([`~huggingface_hub.HfApi`], *optional*): Client with endpoint and token.

    Raises:
        `ValueError`: if the directory has no model, the repository name is not `USER/NAME`, or a file cannot be read.
        `RuntimeError`: if every attempt failed for a reason that could have passed.
    """
    if repo_id.count("/") != 1 or not all(repo_id.split("/")):
        raise ValueError(f"The repository is named USER/NAME, got {repo_id!r}.")
    check_checkpoint(model_dir)
    check_results(model_dir, results)
    check_recipe(model_dir, recipe)
    if dry_run:
        return PushResult(None, uploaded_files(model_dir, _added_files(model_dir, results, recipe)), 0)
    prepare(model_dir, repo_id, results=results, recipe=recipe)
    api = api or HfApi()
    num_retries = 0
    for attempt in range(1, max_attempts + 1):
        try:
            url = api.create_repo(repo_id, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=repo_id,
                folder_path=model_dir,
                revision=revision,
                ignore_patterns=list(NOT_UPLOADED),
                commit_message="Upload model, card, recipe and results",
            )
            return PushResult(str(url), uploaded_files(model_dir), num_retries)
        except (HfHubHTTPError, httpx.TransportError, RuntimeError) as error:
            if not can_pass(error):
                raise
            if attempt == max_attempts:
                raise RuntimeError(
                    f"The upload to {repo_id} failed {max_attempts} times, last with: {error}. What was uploaded is "
                    f"kept: `pacs-trl push --model {model_dir} --repo {repo_id}` resumes."
                ) from error
            num_retries += 1
            time.sleep(first_wait_seconds * 2 ** (attempt - 1))
    raise AssertionError("unreachable")


def push_trained(trainer: Any) -> PushResult | None:
    """
    What [`push`] does, for the model that a trainer has just saved in its `output_dir`: `push_to_hub: true` of a recipe.

    Repository, privacy, branch and token are those of the training arguments. Uploads of checkpoints that are still under
    way are waited for.

    Args:
        trainer ([`~transformers.Trainer`]): Any trainer, after training and saving.

    Returns:
        [`PushResult`], or None on every process but the first.

    Raises:
        As [`push`].
    """
    if not trainer.is_world_process_zero():
        return None
    args = trainer.args
    if trainer.hub_model_id is None:
        trainer.init_hf_repo()
    trainer._finish_current_push()
    record_training(trainer)
    return push(
        Path(args.output_dir),
        trainer.hub_model_id,
        private=bool(args.hub_private_repo),
        revision=args.hub_revision,
        api=HfApi(token=args.hub_token),
    )


def record_training(trainer: Any) -> None:
    """Write the log (`trainer_state.json`) and the circumstances (`provenance.json`: commit, versions, hardware) of a run
    beside its weights; to be called on the first process."""
    output_dir = Path(trainer.args.output_dir)
    trainer.state.save_to_json(str(output_dir / "trainer_state.json"))
    facts = training_facts(trainer.accelerator.num_processes)
    (output_dir / TRAINING_FACTS_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def can_pass(error: BaseException) -> bool:
    """Whether an upload error may be gone at the next attempt: connection errors and busy servers, not refusals."""
    if isinstance(error, HfHubHTTPError):
        return error.response is None or error.response.status_code in PASSING_STATUS
    if isinstance(error, RuntimeError) and error.__cause__ is not None:  # huggingface_hub wraps errors of one file
        return can_pass(error.__cause__)
    return isinstance(error, httpx.TransportError)


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


def check_results(model_dir: Path, results: Path | None = None) -> None:
    """
    Raises:
        `ValueError`: if the results (by default those in the directory) were measured on other weights.
    """
    path = results or model_dir / "results.json"
    if results is None and not path.is_file():
        return
    measured = read_results(path)["model"].get("digest")
    if measured is not None and measured != (present := checkpoint_digest(model_dir)):
        raise ValueError(
            f"{path} was measured on a checkpoint with digest {measured}, but {model_dir} has {present}: these are not the "
            "scores of these weights. Evaluate this checkpoint, or push the one that was evaluated."
        )


def check_recipe(model_dir: Path, recipe: Path | None = None) -> None:
    """
    Raises:
        `ValueError`: if the recipe (by default the one in the directory) does not exist, is no recipe, or would publish an
            access token.
    """
    path = recipe or model_dir / RECIPE_FILE
    path = path / RECIPE_FILE if path.is_dir() else path
    if not path.is_file():
        if recipe is None:
            return
        raise ValueError(f"The recipe {path} does not exist.")
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is not a recipe: it must be a YAML mapping, got {type(settings).__name__}.")
    if settings.get(TOKEN_KEY):
        raise ValueError(
            f"{path} holds `{TOKEN_KEY}`, and the recipe would be published with the model. Remove the key from the file; "
            "log in with `hf auth login` or set HF_TOKEN instead."
        )


def uploaded_files(model_dir: Path, added: Sequence[str] = ()) -> list[str]:
    """Paths in the repository after a push, sorted; `added` are those that [`prepare`] would write."""
    from huggingface_hub.utils import filter_repo_objects

    present = [str(path.relative_to(model_dir)) for path in model_dir.rglob("*") if path.is_file()]
    return sorted(filter_repo_objects({*present, *added}, ignore_patterns=list(NOT_UPLOADED)))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="pacs-trl push", description="Upload a checkpoint with card and results.")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--repo", required=True, help="USER/NAME")
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--results", type=Path, default=None, help="results.json or its directory")
    parser.add_argument("--recipe", type=Path, default=None, help="recipe of the training run")
    parser.add_argument("--dry_run", action="store_true", help="only list what would be uploaded")
    args = parser.parse_args(argv)
    try:
        result = push(
            args.model,
            args.repo,
            private=args.private,
            results=args.results,
            recipe=args.recipe,
            dry_run=args.dry_run,
        )
    except (ValueError, RuntimeError, HfHubHTTPError) as error:
        print(f"pacs-trl push: {error}", file=sys.stderr)
        return 2
    for name in result.files:
        print(name)
    if args.dry_run:
        print(f"{len(result.files)} files would be uploaded to {args.repo}; nothing was sent.")
    else:
        print(f"{result.url}: {len(result.files)} files, {result.num_retries} retries")
    return 0


def _added_files(model_dir: Path, results: Path | None, recipe: Path | None) -> list[str]:
    """What [`prepare`] would add, without writing it."""
    added = ["README.md"]
    results_path = results or (model_dir / "results.json" if (model_dir / "results.json").is_file() else None)
    if results_path is not None:
        added += ["results.json", *hub_evaluations(read_results(results_path))]
    if recipe is not None:
        added.append(RECIPE_FILE)
    if _log_history(model_dir):
        added.append(TRAINING_FIGURE)
    return added


def _log_history(model_dir: Path) -> list[dict[str, Any]]:
    state = model_dir / "trainer_state.json"
    history = json.loads(state.read_text(encoding="utf-8"))["log_history"] if state.is_file() else []
    return history if any("reward" in log for log in history) else []


def _draw_training(model_dir: Path) -> bool:
    """Draw the training curves of `trainer_state.json`; False if there are none or matplotlib is not installed."""
    history = _log_history(model_dir)
    if not history:
        return (model_dir / TRAINING_FIGURE).is_file()
    try:
        from pacs_trl.report import plots
    except ImportError:
        print(
            "Training curves are left out of the card: pip install 'pacs_trl[report]' to draw them.", file=sys.stderr
        )
        return False
    png, svg = plots.training_figure({"training": [history]}, model_dir / Path(TRAINING_FIGURE).stem)
    svg.unlink()
    assert png.name == TRAINING_FIGURE
    return True


if __name__ == "__main__":
    sys.exit(main())
