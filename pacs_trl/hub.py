"""Uploads to the Hub.

A push uploads the files of a model ([`UPLOADED`]) in one commit: recipe, results, log, and configuration files without
secrets and local paths ([`~redaction.published`]), weights and tokenizer unchanged. A README that is no generated card
(`model_card.py`) is kept on both sides. huggingface_hub retries; a second push after a failure sends only missing
files.
"""

import json
import logging
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import filter_repo_objects, httpx, validate_repo_id

from .errors import FailedRun, UserError
from .evaluation.provenance import checkpoint_digest
from .evaluation.results import read_json, read_results
from .model_card import README_FILE, build_card, fetch_readme, is_generated, is_hub_id, kept_readme
from .redaction import published, published_recipe
from .settings import Parser, read_mapping


logger = logging.getLogger(__name__)

WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")
RESULTS_FILE = "results.json"
RECIPE_FILE = "recipe.yaml"
LOG_FILE = "trainer_state.json"
TRAINING_FACTS_FILE = "provenance.json"
# Files in which transformers and peft write local paths, under keys that end as in `_NAMES_A_PATH`.
CONFIGS = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "adapter_config.json"),
    *("processor_config.json", "preprocessor_config.json"),
)
# Files of a model, by their path in the folder. Everything else stays on this machine.
UPLOADED = [
    *WEIGHTS,
    *("*.safetensors.index.json", "pytorch_model.bin.index.json"),
    *CONFIGS,
    *("configuration_*.py", "modeling_*.py", "tokenization_*.py"),
    *("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("*.tiktoken", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *(README_FILE, "LICENSE*", "NOTICE*"),
    *(RECIPE_FILE, RESULTS_FILE, LOG_FILE, TRAINING_FACTS_FILE),
]
_TRAINING_FACTS = ("created", "num_processes", "hardware", "commit", "versions")
_NAMES_A_PATH = re.compile(r"(path|file|dir)$")
# Metadata in which peft repeats the local path of the base model.
_LOCAL_BASE = re.compile(rb"^(base_model: *|- base_model:\w+:)([/~.\\]|[A-Za-z]:\\).*\n", re.MULTILINE)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# What git refuses in the name of a branch.
_NO_BRANCH = re.compile(r"[\s~^:?*\[\\\x00-\x1f\x7f]|\.\.|@\{|//|^[/-]|[/.]$|(^|/)\.|\.lock(/|$)|^@?$")


def push(
    model_dir: Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    results: Path | None = None,
    recipe: Path | None = None,
    commit_message: str | None = None,
    dry_run: bool = False,
    api: HfApi | None = None,
) -> list[str]:
    """
    Upload a checkpoint with its card, recipe, and results, without writing into the directory. Return the paths of the
    files.

    Args:
        model_dir (`Path`): Directory of one checkpoint.
        repo_id (`str`): `USER/NAME`; created if it does not exist, `private` or not.
        revision (`str`, *optional*): Branch, by default the main one; created if it does not exist.
        results, recipe (`Path`, *optional*): Files, or directories that contain them; by default `model_dir`.
        commit_message (`str`, *optional*): Title of the commit.
        dry_run (`bool`): List the files without any connection.
        api ([`~huggingface_hub.HfApi`], *optional*): With an address or a token of its own.

    Raises:
        `ValueError`: if the repository is not `USER/NAME`, the branch is a commit, or [`collect_upload`] refuses the
            directory.
        [`FailedRun`]: if the upload failed.
    """
    if repo_id.count("/") != 1 or not all(repo_id.split("/")):
        raise UserError(f"The repository must be USER/NAME, got {repo_id!r}. Set --repo.")
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"{str(error).rstrip('.')}. Set --repo.") from error
    check_branch(revision)
    upload = collect_upload(model_dir, results, recipe)
    warn_of_local_base(model_dir, upload)
    contents = upload.contents
    if dry_run:
        return sorted({*contents, README_FILE})

    local_readme = kept_readme(model_dir)
    if local_readme is None:
        card = build_card(
            repo_id,
            results=upload.results,
            recipe=upload.recipe,
            training=upload.training,
            is_adapter=upload.is_adapter,
        )
        contents[README_FILE] = card.encode()
    else:
        logger.warning(f"{model_dir / README_FILE} is not generated and is uploaded instead of a model card.")
        contents[README_FILE] = _LOCAL_BASE.sub(b"", local_readme)

    api = api or HfApi()
    progress = "Nothing was uploaded"
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        create_branch(api, repo_id, revision)
        hub_readme = fetch_readme(repo_id, api.endpoint, revision, api.token)
        if hub_readme is not None:
            is_edited = not is_generated(hub_readme.encode()) and hub_readme.encode() != contents[README_FILE]
            if is_edited:
                del contents[README_FILE]
                logger.warning(f"README.md of {repo_id} is not generated and is kept. Delete it there to replace it.")
        progress = "Files that were transferred are not sent again, but no commit is confirmed"
        operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in contents.items()]
        title = commit_message or "Upload model, card, recipe and results"
        api.create_commit(repo_id, operations, commit_message=title, revision=revision)
    except (OSError, RuntimeError, httpx.HTTPError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        command = ["pacs-trl", "push", "--model", str(model_dir), "--repo", repo_id]
        if private:
            command.append("--private")
        if results is not None:
            command += ["--results", str(results)]
        if recipe is not None:
            command += ["--recipe", str(recipe)]
        if revision is not None:
            command += ["--revision", revision]
        if commit_message is not None:
            command += ["--commit_message", commit_message]
        raise FailedRun(
            f"The upload to {repo_id} failed: {reason}. {progress}; the model is complete in {model_dir}. "
            f"{_log_in(error, api.token)}Upload it with `{shlex.join(command)}`."
        ) from error
    return sorted(contents)


def check_branch(revision: str | None) -> None:
    """Raise a `ValueError` if git refuses the name of a branch, or it is the hash of a commit, of which the Hub would
    make a branch with that name."""
    if revision is None:
        return
    if _NO_BRANCH.search(revision):
        raise UserError(f"The revision {revision!r} cannot be the name of a branch of git. Name another branch.")
    if _COMMIT.fullmatch(revision):
        raise UserError(f"The revision {revision} is a commit, which an upload cannot change. Name a branch.")


def create_branch(api: HfApi, repo_id: str, revision: str | None) -> None:
    """Create the branch of an upload in an existing repository, unless it exists. References like `refs/pr/1` are no
    branches, and are made on the Hub. Raises a `ValueError` for the hash of a commit."""
    check_branch(revision)
    if revision in (None, "main") or revision.startswith("refs/"):
        return
    api.create_branch(repo_id, branch=revision, exist_ok=True)


def _log_in(error: Exception, token: str | bool | None) -> str:
    """Return a sentence on logging in, with a space, if that may be why an upload failed."""
    if not token and get_token() is None:
        return "There is no token on this machine: run `hf auth login`, or set HF_TOKEN. "
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404):
        return "The token may be invalid, or may not write there: run `hf auth login` with one that may. "
    return ""


def warn_of_local_base(model_dir: Path, upload: "Upload") -> None:
    """Log a warning if the base model of a push is a local directory, which others do not have."""
    settings: dict[str, Any] = {}
    if upload.recipe:
        settings = upload.recipe
    elif upload.training:
        settings = upload.training.get("settings", {})
    base_model = settings.get("model_name_or_path")
    setting = f"model_name_or_path of {RECIPE_FILE}"
    consequence = "the card names it without a link"
    if upload.is_adapter:
        base_model = _base_of_adapter(model_dir) or base_model
        setting = "base_model_name_or_path of adapter_config.json"
        consequence = "others cannot load the adapter"
    if base_model and not is_hub_id(_shortened(base_model)):
        logger.warning(
            f"The base model {base_model!r} is a local directory, so {consequence}. If the model is on the Hub, write "
            f"its id as {setting} in {model_dir} before you push."
        )


def _base_of_adapter(model_dir: Path) -> Any:
    """Return the name of the base model in the configuration of an adapter."""
    return read_json(model_dir / "adapter_config.json").get("base_model_name_or_path")


class Upload(NamedTuple):
    """
    Files of a push, and what its card is made from.

    Attributes:
        contents (`dict`): By path in the repository, a local file or redacted content; without the README.
        results, recipe, training (`dict`, *optional*): Content of results.json, recipe.yaml, and provenance.json.
        is_adapter (`bool`): Whether the weights are those of an adapter.
    """

    contents: dict[str, Path | bytes]
    results: dict[str, Any] | None
    recipe: dict[str, Any] | None
    training: dict[str, Any] | None
    is_adapter: bool


def collect_upload(model_dir: Path, results: Path | None = None, recipe: Path | None = None) -> Upload:
    """Collect the files of a push. Raises a `ValueError` if there is no model, a file cannot be read, or the results
    belong to other weights."""
    contents = _files_of_model(model_dir)
    for name in (LOG_FILE, TRAINING_FACTS_FILE, *CONFIGS):
        if name not in contents:
            continue
        content = read_json(model_dir / name)
        redacted = _without_paths(content) if name in CONFIGS else published(content)
        if redacted != content:  # otherwise the file is uploaded byte for byte
            contents[name] = (json.dumps(redacted, indent=2, ensure_ascii=False) + "\n").encode()

    published_results = None
    if results is not None or RESULTS_FILE in contents:
        published_results = published(read_results(results or model_dir / RESULTS_FILE))
        _check_same_weights(published_results, model_dir)
        contents[RESULTS_FILE] = (json.dumps(published_results, indent=1) + "\n").encode()

    settings = None
    if recipe is not None or RECIPE_FILE in contents:
        file = recipe or model_dir / RECIPE_FILE
        if file.is_dir():
            file = file / RECIPE_FILE
        settings = read_mapping(file, "recipe")
        contents[RECIPE_FILE] = yaml.safe_dump(published_recipe(settings), allow_unicode=True).encode()

    training = None
    if TRAINING_FACTS_FILE in contents:
        training = read_json(model_dir / TRAINING_FACTS_FILE, _TRAINING_FACTS)

    is_adapter = "adapter_config.json" in contents
    if is_adapter and settings is not None:
        base_model = _base_of_adapter(model_dir)
        if is_hub_id(base_model):  # which may have been corrected there, but not in the recipe
            settings["model_name_or_path"] = base_model
    return Upload(contents, published_results, settings, training, is_adapter)


def _files_of_model(model_dir: Path) -> dict[str, Path | bytes]:
    """Return the files to upload, by their path in the folder. Raises a `ValueError` if it contains no model."""
    names = [path.name for path in model_dir.glob("*") if path.is_file()]
    has_config = "config.json" in names or "adapter_config.json" in names
    has_weights = any(filter_repo_objects(names, allow_patterns=list(WEIGHTS)))
    if not has_config or not has_weights:
        raise UserError(
            f"{model_dir} is not a saved model: it needs a config.json (or adapter_config.json) and "
            f"{' or '.join(WEIGHTS)} files. Push the directory of one checkpoint."
        )
    names += [f"{path.parent.name}/{path.name}" for path in model_dir.glob("additional_chat_templates/*.jinja")]
    return {name: model_dir / name for name in filter_repo_objects(names, allow_patterns=UPLOADED)}


def _check_same_weights(results: dict[str, Any], model_dir: Path) -> None:
    """Raise a `ValueError` if results were measured on other weights; log a warning if that cannot be known, because a
    server generated the completions."""
    model = results["model"]
    digest = checkpoint_digest(model_dir)
    if "server" in model:
        logger.warning(
            f"The results were measured on {model['name']!r} of a server, whose weights cannot be compared with those "
            f"of {model_dir}. Push them only if the server had loaded these."
        )
    elif "digest" not in model:
        raise UserError(
            f"The results were measured on {model['name']} of the Hub, not on {model_dir}. Evaluate the directory "
            "(--model), and push these results."
        )
    elif model["digest"] != digest:
        raise UserError(
            f"The results were measured on another checkpoint (digest {model['digest']}) than {model_dir} "
            f"({digest}). Evaluate this checkpoint, or push the other one."
        )


def _without_paths(content: Any, key: str = "") -> Any:
    """Shorten local paths in a configuration to names, without other changes."""
    if isinstance(content, dict):
        return {name: _without_paths(value, name) for name, value in content.items()}
    if isinstance(content, list):
        return [_without_paths(item, key) for item in content]
    if isinstance(content, str) and _NAMES_A_PATH.search(key):
        return _shortened(content)
    return content


def _shortened(path: str) -> str:
    """Return the last part of a local path, and any other name unchanged."""
    return published({"path": path})["path"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `pacs-trl push`."""
    parser = Parser("push", "Upload a checkpoint with card and results.")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--repo", required=True, help="USER/NAME")
    parser.add_argument("--private", action="store_true", help="make a private repository")
    parser.add_argument("--results", type=Path, default=None, help="results.json or its directory")
    parser.add_argument("--recipe", type=Path, default=None, help="recipe of the training run")
    parser.add_argument("--revision", default=None, help="branch, created if it does not exist; by default main")
    parser.add_argument("--commit_message", default=None, help="title of the commit")
    parser.add_argument("--dry_run", action="store_true", help="only list what would be uploaded")
    args = parser.parse_args(argv)
    files = push(
        args.model,
        args.repo,
        private=args.private,
        revision=args.revision,
        commit_message=args.commit_message,
        results=args.results,
        recipe=args.recipe,
        dry_run=args.dry_run,
    )
    print(*files, sep="\n")
    outcome = "would be uploaded; nothing was sent" if args.dry_run else "uploaded"
    print(f"{args.repo}: {len(files)} files {outcome}.")
    return 0
