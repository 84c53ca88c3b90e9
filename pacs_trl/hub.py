"""Model cards and uploads to the Hub.

A push uploads the files of a model ([`UPLOADED`]) in one commit: recipe, results, log, and configuration files without
secrets and local paths ([`~redaction.published`]), weights and tokenizer unchanged. A README that was edited by hand
is kept on both sides. huggingface_hub retries; a second push after a failure sends only missing files.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import huggingface_hub.constants
import yaml
from huggingface_hub import (
    CommitOperationAdd,
    EvalResult,
    HfApi,
    ModelCard,
    ModelCardData,
    get_session,
)
from huggingface_hub.errors import RemoteEntryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import build_hf_headers, filter_repo_objects, hf_raise_for_status, httpx, validate_repo_id

from .data import TRAINING_SETS
from .data.sets import FILE_FORMATS, MINIATURE
from .errors import FailedRun
from .evaluation.provenance import checkpoint_digest
from .evaluation.results import read_json, read_results
from .redaction import published
from .report.tables import benchmark_table, one_line, to_markdown
from .settings import Parser, read_mapping


logger = logging.getLogger(__name__)

WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")
README_FILE, RESULTS_FILE, RECIPE_FILE, LOG_FILE = "README.md", "results.json", "recipe.yaml", "trainer_state.json"
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
_MARK = "\n<!-- Written by pacs_trl; an edited card is kept. "  # followed by a digest of the text before it

HUB = "https://huggingface.co"
TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Settings that the card omits, because they describe the machine or are shown elsewhere on the card.
_NOT_SHOWN = re.compile(
    r"method|model_name_or_path|dataset_name|disable_tqdm|report_to|run_name|hub_|push_|output_dir|log|accelerator_"
)


class PushResult(NamedTuple):
    """URL of the repository (`None` for a dry run), and paths of the files of the push."""

    url: str | None
    files: list[str]


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
) -> PushResult:
    """
    Upload a checkpoint with its card, recipe, and results, without writing into the directory.

    Args:
        repo_id (`str`): `USER/NAME`; created if it does not exist, `private` or not.
        revision (`str`, *optional*): Branch, by default the main one.
        results, recipe (`Path`, *optional*): Files, or directories that contain them; by default `model_dir`.
        dry_run (`bool`): List the files without any connection.

    Raises:
        `ValueError`: if the repository is not `USER/NAME`, or [`published_contents`] refuses the directory.
        [`FailedRun`]: if the upload failed.
    """
    if repo_id.count("/") != 1 or not all(repo_id.split("/")):
        raise ValueError(f"The repository must be USER/NAME, got {repo_id!r}. Set --repo.")
    validate_repo_id(repo_id)
    contents, known = published_contents(model_dir, results, recipe)
    if dry_run:
        return PushResult(None, sorted({*contents, README_FILE}))
    ours = kept_readme(model_dir)
    if ours is None:
        contents[README_FILE] = build_card(repo_id, **known).encode()
    else:
        logger.warning(f"{model_dir / README_FILE} was edited by hand and is uploaded instead of a model card.")
        contents[README_FILE] = _LOCAL_BASE.sub(b"", ours)
    api = api or HfApi()
    uploaded = "Nothing was uploaded"
    try:
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        theirs = _fetch_readme(repo_id, api.endpoint, revision, api.token)
        if theirs is not None and not _is_our_card(theirs) and theirs.encode() != contents[README_FILE]:
            del contents[README_FILE]
            logger.warning(f"README.md of {repo_id} was edited there and is kept. Delete it there to replace it.")
        uploaded = "Files that were transferred are not sent again, but no commit is confirmed"
        operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in contents.items()]
        title = commit_message or "Upload model, card, recipe and results"
        api.create_commit(repo_id, operations, commit_message=title, revision=revision)
    except (OSError, RuntimeError, httpx.HTTPError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise FailedRun(
            f"The upload to {repo_id} failed: {reason}. {uploaded}; the model is complete in {model_dir}. "
            f"Upload it with `pacs-trl push --model {model_dir} --repo {repo_id}`."
        ) from error
    return PushResult(str(url), sorted(contents))


def main(argv: Sequence[str] | None = None) -> int:
    """Run `pacs-trl push`."""
    parser = Parser("push", "Upload a checkpoint with card and results.")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--repo", required=True, help="USER/NAME")
    parser.add_argument("--private", action="store_true", help="make a private repository")
    parser.add_argument("--results", type=Path, default=None, help="results.json or its directory")
    parser.add_argument("--recipe", type=Path, default=None, help="recipe of the training run")
    parser.add_argument("--dry_run", action="store_true", help="only list what would be uploaded")
    options = vars(parser.parse_args(argv))
    result = push(options.pop("model"), repo := options.pop("repo"), **options)
    print(*result.files, sep="\n")
    sent = f"{result.url}: {len(result.files)} files"
    print(f"{len(result.files)} files would be uploaded to {repo}; nothing was sent." if result.url is None else sent)
    return 0


def published_contents(
    model_dir: Path, results: Path | None = None, recipe: Path | None = None
) -> tuple[dict[str, Path | bytes], dict[str, Any]]:
    """
    Return the files of a push without the README, as path in the repository and local file or redacted content; and
    the arguments of [`build_card`].

    Raises:
        `ValueError`: if there is no model, a file cannot be read, or the results belong to other weights.
    """
    present = [path.relative_to(model_dir).as_posix() for path in model_dir.glob("*") if path.is_file()]
    has_config = "config.json" in present or "adapter_config.json" in present
    if not has_config or not list(filter_repo_objects(present, allow_patterns=list(WEIGHTS))):
        raise ValueError(
            f"{model_dir} is not a saved model: it needs a config.json (or adapter_config.json) and "
            f"{' or '.join(WEIGHTS)} files. Push the directory of one checkpoint."
        )
    present += [f"{path.parent.name}/{path.name}" for path in model_dir.glob("additional_chat_templates/*.jinja")]
    contents: dict[str, Path | bytes] = {
        name: model_dir / name for name in filter_repo_objects(present, allow_patterns=UPLOADED)
    }
    for name in (LOG_FILE, TRAINING_FACTS_FILE, *CONFIGS):
        if name in contents:
            content = read_json(model_dir / name)
            clean = _without_paths(content) if name in CONFIGS else published(content)
            if clean != content:  # otherwise byte for byte
                contents[name] = (json.dumps(clean, indent=2, ensure_ascii=False) + "\n").encode()
    measured = settings = None
    if results is not None or RESULTS_FILE in contents:
        measured = published(read_results(results or model_dir / RESULTS_FILE))
        digest, present_digest = measured["model"].get("digest"), checkpoint_digest(model_dir)
        if digest not in (None, present_digest):
            raise ValueError(
                f"The results were measured on another checkpoint (digest {digest}) than {model_dir} "
                f"({present_digest}). Evaluate this checkpoint, or push the other one."
            )
        contents[RESULTS_FILE] = (json.dumps(measured, indent=1) + "\n").encode()
    if recipe is not None or RECIPE_FILE in contents:
        file = recipe or model_dir / RECIPE_FILE
        settings = read_mapping(file / RECIPE_FILE if file.is_dir() else file, "recipe")
        contents[RECIPE_FILE] = yaml.safe_dump(published(settings), allow_unicode=True).encode()
    training = None
    if TRAINING_FACTS_FILE in contents:
        training = read_json(model_dir / TRAINING_FACTS_FILE, _TRAINING_FACTS)
    is_adapter = "adapter_config.json" in contents
    return contents, {"results": measured, "recipe": settings, "training": training, "is_adapter": is_adapter}


def kept_readme(model_dir: Path) -> bytes | None:
    """Return the README of a directory; `None` if there is none or it is our card, which may be overwritten."""
    file = model_dir / README_FILE
    content = file.read_bytes() if file.is_file() else None
    return None if content is None or _is_our_card(content.decode(errors="replace")) else content


def _is_our_card(text: str) -> bool:
    card, mark, digest = text.rpartition(_MARK)
    return bool(mark) and digest.strip() == f"{_digest(card)} -->"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_paths(content: Any, key: str = "") -> Any:
    """Shorten local paths in a configuration to names, without other changes."""
    if isinstance(content, dict):
        return {name: _without_paths(value, name) for name, value in content.items()}
    if isinstance(content, list):
        return [_without_paths(item, key) for item in content]
    is_path = isinstance(content, str) and _NAMES_A_PATH.search(key)
    return published({"path": content})["path"] if is_path else content


def _fetch_readme(repo_id: str, endpoint: str, revision: str | None = None, token=None) -> str | None:
    """Download README.md of a repository; `None` if the file or the branch does not exist."""
    url = f"{endpoint}/{repo_id}/resolve/{quote(revision or 'main', safe='')}/{README_FILE}"
    response = get_session().get(url, headers=build_hf_headers(token=token), follow_redirects=True, timeout=10)
    try:
        hf_raise_for_status(response)
    except (RemoteEntryNotFoundError, RevisionNotFoundError):
        return None
    return response.content.decode("utf-8", errors="replace")


def write_card(model_dir: Path, name: str, recipe: dict[str, Any] | None, training: dict[str, Any]) -> None:
    """Write the card of a saved model unless the README was edited by hand."""
    if kept_readme(model_dir) is not None:
        logger.warning(f"{model_dir / README_FILE} was edited by hand and is kept. Remove it to create a model card.")
        return
    is_adapter = (model_dir / "adapter_config.json").is_file()
    card = build_card(name, recipe=recipe, training=training, is_adapter=is_adapter)
    (model_dir / README_FILE).write_bytes(card.encode())


def build_card(
    name: str,
    *,
    results: dict[str, Any] | None = None,
    recipe: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    is_adapter: bool = False,
) -> str:
    """
    Build the README of one checkpoint from its results.json, recipe.yaml, and provenance.json, without secrets and
    local paths. `name` is `USER/NAME` on the Hub, or a local name.
    """
    given = recipe or (training or {}).get("settings", {})
    settings, training = published(given), published(training or {})
    settings |= {key: training[key] for key in ("dataset_name",) if key in training}  # given to `create_model_card`
    title, base = one_line(name.split("/")[-1]), settings.get("model_name_or_path")
    method, paper = one_line(str(settings.get("method", "pacs"))), training.get("paper", {})
    dataset = settings.get("dataset_name")
    dataset = TRAINING_SETS[dataset].hub_id if str(dataset) in TRAINING_SETS else dataset
    data = ModelCardData(
        model_name=title,
        base_model=base if is_hub_id(base) else None,
        datasets=[dataset] if is_hub_id(dataset) else None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=sorted(
            {
                "trl",
                method.lower(),
                *(f"arxiv:{paper[key]}" for key in paper if key == "id"),
                *training.get("tags", ()),
            }
        ),
        eval_results=model_index(results) if results else None,
        **license_of(str(given.get("model_name_or_path") or "")),
    )
    shown = {key: value for key, value in settings.items() if not _NOT_SHOWN.match(key)}
    card = ModelCard.from_template(
        data,
        str(TEMPLATE),
        model_name=title,
        place=json.dumps(name if "/" in name else "."),
        origin=f"an adapter of {_origin(settings)}" if is_adapter else _origin(settings),
        method="GenAC" if method == "genac" else method.upper(),
        paper=paper,
        dataset=_linked(dataset, "datasets/") if dataset else None,
        tools=", ".join(_linked(tool) for tool in settings.get("tools") or []),
        environment=_linked(settings["environment"]) if settings.get("environment") else None,
        recipe=recipe,
        settings=_block(yaml.safe_dump(shown, allow_unicode=True).strip(), "yaml") if shown else None,
        training=training,
        **(_result_facts(results) if results else {}),
    )
    text = card.content.rstrip() + "\n"
    return f"{text}{_MARK}{_digest(text)} -->\n"


def is_hub_id(name: Any) -> bool:
    """Whether a published setting names a repository; redacted local paths have no slash, or a file suffix."""
    is_name = isinstance(name, str) and bool(_HUB_ID.fullmatch(name))
    return is_name and not name.startswith(MINIATURE) and Path(name).suffix not in FILE_FORMATS


@lru_cache
def license_of(model: str) -> dict[str, str]:
    """Read the license from the card of the base model; `"unknown"` if it has none or cannot be reached."""
    if model.startswith(MINIATURE):
        return {"license": "apache-2.0"}  # generated by this package
    try:
        if Path(model).is_absolute():
            text = (Path(model) / README_FILE).read_text(encoding="utf-8")
        else:
            text = _fetch_readme(model, huggingface_hub.constants.ENDPOINT) if is_hub_id(model) else None
        card = ModelCard(text or "---\n---\n").data
    except (OSError, ValueError, yaml.YAMLError, httpx.HTTPError):
        return {"license": "unknown"}
    stated = {key: card.get(key) for key in ("license", "license_name", "license_link") if card.get(key)}
    if "://" not in stated.get("license_link", "://"):
        file = stated.pop("license_link")
        stated |= {"license_link": f"{HUB}/{model}/blob/main/{file}"} if is_hub_id(model) else {}
    return {"license": "unknown"} | stated


def _origin(settings: Mapping[str, Any]) -> str:
    name = str(settings.get("model_name_or_path") or "")
    if not name:
        return "a model made from scratch" if "model_name_or_path" in settings else "a language model"
    return "a miniature model made from scratch" if name.startswith(MINIATURE) else f"the model {_linked(name)}"


def _linked(name: Any, kind: str = "") -> str:
    """Return a link to a repository of the Hub, or any other name in code style."""
    return f"[{name}]({HUB}/{kind}{name})" if is_hub_id(name) else f"`{one_line(str(name)).replace('`', chr(39))}`"


def model_index(results: dict[str, Any]) -> list[EvalResult]:
    """Return `model-index` entries of the smallest and the largest k of every benchmark, in percent with interval."""
    entries = []
    for name, entry in results["benchmarks"].items():
        ks = sorted(entry["pass_at_k"], key=int)
        for k in dict.fromkeys((ks[0], ks[-1])):
            cell = entry["pass_at_k"][k]
            entries.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=entry["source"].get("hub_id") or name.replace("/", "-"),
                    dataset_name=entry["title"],
                    metric_type=f"pass@{k}",
                    metric_name=f"pass@{k}, 95 % interval {100 * cell['lower']:.1f} to {100 * cell['upper']:.1f}",
                    metric_value=round(100 * cell["value"], 2),
                )
            )
    return entries


def _result_facts(results: dict[str, Any]) -> dict[str, Any]:
    shown = []
    for name, entry in results["benchmarks"].items():
        header, lines = benchmark_table([results], name)
        markdown = to_markdown(header[3:], [line[3:] for line in lines])  # without method, n and runs
        shown.append({**entry["source"], "title": one_line(entry["title"]), "markdown": markdown})
    instruction = results["protocol"]["prompt"]["instruction"]
    example = _block(f"<problem> {instruction}" if instruction else "<problem>", "text")
    return {"tables": shown, "results": results, "prompt_example": example, **results["protocol"]}


def _block(text: str, language: str) -> str:
    """Return a code block with a fence longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
