"""`pacs-trl push`, and `push_to_hub: true`: a checkpoint with its card, recipe, results and training curves to the Hub.

First the files that travel with the weights are written into the checkpoint directory (`prepare`), then what belongs to a model
is uploaded (`files.py`). The upload goes through huggingface_hub: it skips files that are already there,
so an interrupted push is resumed by running the command again, and errors that can pass are retried here. A trainer that has
just finished leaves its log and circumstances beside the weights (`record_training`) and pushes in the same way (`push_trained`).
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import yaml
from huggingface_hub import CommitOperationAdd, HfApi, get_session
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from ..evaluation.provenance import checkpoint_digest, training_facts
from ..redaction import published
from ..report.inputs import read_described, read_log_history, read_training_facts
from ..settings import read_mapping
from ..settings.command_line import Parser
from .files import LOG_FILE, README_FILE, RESULTS_FILE, WEIGHTS, files_of_a_model, published_contents
from .model_card import RECIPE_FILE, TRAINING_FACTS_FILE, TRAINING_FIGURE, CardInputs, build_card, hub_evaluations
from .readme import NOTHING, HandWritten, hand_written, the_one_to_keep, with_our_part


logger = logging.getLogger(__name__)

PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)


class PushResult(NamedTuple):
    """`url` of the repository (None for a dry run), the files that belong to the push, and how often it was retried."""

    url: str | None
    files: list[str]
    num_retries: int


def prepare(
    model_dir: Path,
    repo_id: str,
    *,
    results: Path | None = None,
    recipe: Path | None = None,
    repository_readme: str | None = None,
) -> list[Path]:
    """
    Write card, results, evaluation metadata, recipe and training figure into a checkpoint directory.

    Args:
        model_dir (`Path`): Checkpoint directory.
        repo_id (`str`): `USER/NAME`; the name becomes the title of the card.
        results (`Path`, *optional*): Results file to take along; `results.json` of the directory if left out.
        recipe (`Path`, *optional*): Recipe to take along; `recipe.yaml` of the directory if left out.
        repository_readme (`str`, *optional*): README.md of the repository: what was written by hand in it is kept.

    Returns:
        `list[Path]`: The files written or taken along.

    Raises:
        `ValueError`: if the directory has no model, a file that goes into the card cannot be read, or text by hand in the
            README of the directory or of the repository would be lost.
    """
    kept = _check(model_dir, repo_id, results, recipe, repository_readme)
    if results is not None:
        content = json.dumps(published(read_described(results)), indent=1) + "\n"
        (model_dir / RESULTS_FILE).write_text(content, encoding="utf-8")
    if recipe is not None and _recipe_file(recipe).resolve() != (model_dir / RECIPE_FILE).resolve():
        settings = published(read_mapping(_recipe_file(recipe), "recipe"))
        (model_dir / RECIPE_FILE).write_text(yaml.safe_dump(settings, allow_unicode=True), encoding="utf-8")
    written = [model_dir / name for name in (RESULTS_FILE, RECIPE_FILE) if (model_dir / name).is_file()]
    has_figure = _draw_training(model_dir)
    if has_figure:
        written.append(model_dir / TRAINING_FIGURE)
    inputs = card_inputs(model_dir)._replace(has_training_figure=has_figure)
    if inputs.results:
        for name, content in hub_evaluations(inputs.results).items():
            (model_dir / name).parent.mkdir(exist_ok=True)
            (model_dir / name).write_text(content, encoding="utf-8")
            written.append(model_dir / name)
    card = build_card(repo_id.split("/")[-1], inputs)
    (model_dir / README_FILE).write_text(with_our_part(kept, card), encoding="utf-8")
    return [*written, model_dir / README_FILE]


def card_inputs(model_dir: Path) -> CardInputs:
    """What a checkpoint directory holds for its card: results.json, recipe.yaml, provenance.json and the training figure,
    where present."""
    results, recipe, training = (model_dir / name for name in (RESULTS_FILE, RECIPE_FILE, TRAINING_FACTS_FILE))
    return CardInputs(
        results=published(read_described(results)) if results.is_file() else None,
        recipe=read_mapping(recipe, "recipe") if recipe.is_file() else None,
        training=published(read_training_facts(training)) if training.is_file() else None,
        is_adapter=(model_dir / "adapter_config.json").is_file(),
        has_training_figure=(model_dir / TRAINING_FIGURE).is_file(),
    )


def write_card(model_dir: Path, recipe: dict[str, Any]) -> None:
    """The card of a model that has just been trained, before anything was measured; text by hand in README.md is kept."""
    training = read_training_facts(model_dir / TRAINING_FACTS_FILE)
    is_adapter = (model_dir / "adapter_config.json").is_file()
    card = build_card(model_dir.resolve().name, CardInputs(recipe=recipe, training=training, is_adapter=is_adapter))
    (model_dir / README_FILE).write_text(with_our_part(kept_readme(model_dir), card), encoding="utf-8")


def kept_readme(model_dir: Path) -> HandWritten:
    """
    What was written by hand in the README of a directory.

    Raises:
        `ValueError`: if it cannot be told from our part, see [`~report.readme.hand_written`].
    """
    readme = model_dir / README_FILE
    if not readme.is_file():
        return NOTHING
    try:
        return hand_written(readme.read_text(encoding="utf-8"), str(readme))
    except UnicodeDecodeError as error:
        raise ValueError(f"{readme} is not UTF-8 text: {error}.") from error


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
        `ValueError`: if the directory has no model, the repository name is not `USER/NAME`, a file cannot be read, or text by
            hand in a README would be lost.
        `RuntimeError`: if every attempt failed for a reason that could have passed.
    """
    _check(model_dir, repo_id, results, recipe)
    if dry_run:
        return PushResult(None, files_of_a_model(model_dir, _added_files(model_dir, results, recipe)), 0)
    api = api or HfApi()
    num_retries = 0

    def patiently(call: Callable[[], Any]) -> Any:
        nonlocal num_retries
        for attempt in range(1, max_attempts + 1):
            try:
                return call()
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

    url = patiently(lambda: api.create_repo(repo_id, private=private, exist_ok=True))
    theirs = patiently(lambda: _repository_readme(api, repo_id, revision))
    prepare(model_dir, repo_id, results=results, recipe=recipe, repository_readme=theirs)
    contents = published_contents(model_dir)
    patiently(
        lambda: api.create_commit(
            repo_id,
            [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in contents.items()],
            commit_message="Upload model, card, recipe and results",
            revision=revision,
        )
    )
    return PushResult(str(url), list(contents), num_retries)


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
    measured = read_described(path)["model"].get("digest")
    if measured is not None and measured != (present := checkpoint_digest(model_dir)):
        raise ValueError(
            f"{path} was measured on a checkpoint with digest {measured}, but {model_dir} has {present}: these are not the "
            "scores of these weights. Evaluate this checkpoint, or push the one that was evaluated."
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = Parser("push", "Upload a checkpoint with card and results.")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--repo", required=True, help="USER/NAME")
    parser.add_argument("--private", action="store_true", help="make a private repository")
    parser.add_argument("--results", type=Path, default=None, help="results.json or its directory")
    parser.add_argument("--recipe", type=Path, default=None, help="recipe of the training run")
    parser.add_argument("--dry_run", action="store_true", help="only list what would be uploaded")
    args = parser.parse_args(argv)
    try:
        result = push(
            args.model, args.repo, private=args.private, results=args.results, recipe=args.recipe, dry_run=args.dry_run
        )
    except (ValueError, OSError, RuntimeError, HfHubHTTPError, httpx.TransportError) as error:
        print(f"pacs-trl push: {error}", file=sys.stderr)
        return 2
    for name in result.files:
        print(name)
    if args.dry_run:
        print(f"{len(result.files)} files would be uploaded to {args.repo}; nothing was sent.")
    else:
        print(f"{result.url}: {len(result.files)} files, {result.num_retries} retries")
    return 0


def _check(
    model_dir: Path, repo_id: str, results: Path | None, recipe: Path | None, repository_readme: str | None = None
) -> HandWritten:
    """Everything that can be wrong with the files, before anything is written or sent; what is kept of the README."""
    if repo_id.count("/") != 1 or not all(repo_id.split("/")):
        raise ValueError(f"The repository is named USER/NAME, got {repo_id!r}.")
    check_checkpoint(model_dir)
    check_results(model_dir, results)
    if recipe is not None:
        read_mapping(_recipe_file(recipe), "recipe")
    card_inputs(model_dir)
    _log_history(model_dir)
    theirs = hand_written(repository_readme, f"README.md of {repo_id}")
    return the_one_to_keep(kept_readme(model_dir), theirs, str(model_dir / README_FILE), repo_id)


def _repository_readme(api: HfApi, repo_id: str, revision: str | None) -> str | None:
    """README.md of the repository; None if it, or the branch, does not exist yet."""
    url = f"{api.endpoint}/{repo_id}/resolve/{quote(revision or 'main', safe='')}/{README_FILE}"
    response = get_session().get(url, headers=build_hf_headers(token=api.token), follow_redirects=True)
    try:
        hf_raise_for_status(response)
    except (RemoteEntryNotFoundError, RevisionNotFoundError):
        return None
    return response.content.decode("utf-8")


def _recipe_file(recipe: Path) -> Path:
    return recipe / RECIPE_FILE if recipe.is_dir() else recipe


def _added_files(model_dir: Path, results: Path | None, recipe: Path | None) -> list[str]:
    """What [`prepare`] would add, without writing it."""
    added = [README_FILE]
    results_path = results or (model_dir / RESULTS_FILE if (model_dir / RESULTS_FILE).is_file() else None)
    if results_path is not None:
        added += [RESULTS_FILE, *hub_evaluations(read_described(results_path))]
    if recipe is not None:
        added.append(RECIPE_FILE)
    if _log_history(model_dir):
        added.append(TRAINING_FIGURE)
    return added


def _log_history(model_dir: Path) -> list[dict[str, Any]]:
    state = model_dir / LOG_FILE
    history = read_log_history(state) if state.is_file() else []
    return history if any("reward" in log for log in history) else []


def _draw_training(model_dir: Path) -> bool:
    """Draw the training curves of `trainer_state.json`; False if there are none or matplotlib is not installed."""
    history = _log_history(model_dir)
    if not history:
        return (model_dir / TRAINING_FIGURE).is_file()
    try:
        from ..report import plots
    except ImportError:
        print(
            "Training curves are left out of the card: pip install 'matplotlib>=3.10' to draw them.", file=sys.stderr
        )
        return False
    png, svg = plots.training_figure({"training": [history]}, model_dir / Path(TRAINING_FIGURE).stem)
    svg.unlink()
    assert png.name == TRAINING_FIGURE
    return True


if __name__ == "__main__":
    sys.exit(main())
