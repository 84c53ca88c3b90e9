"""`pacs-trl push`, and pushing of a trainer: a checkpoint with its card, recipe, results and training curves to the Hub.

First what explains the model is written into the checkpoint directory (`describe.py`), then what belongs to a model is uploaded
(`files.py`). The upload goes through huggingface_hub: it skips files that are already there, so an interrupted push is resumed by
running the command again, and errors that can pass are retried here.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from huggingface_hub import CommitOperationAdd, HfApi, get_session
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, httpx, validate_repo_id

from ..settings.command_line import FailedRun, Parser
from .describe import check_checkpoint, check_described, describe, described_files
from .files import README_FILE, files_of_a_model, published_contents
from .readme import hand_written, kept_readme, the_one_to_keep


logger = logging.getLogger(__name__)

PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)


class PushResult(NamedTuple):
    """`url` of the repository (None for a dry run), the files that belong to the push, and how often it was retried."""

    url: str | None
    files: list[str]
    num_retries: int


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
        results, recipe (`Path`, *optional*): To take along; those of the directory if left out.
        commit_message (`str`, *optional*): Title of the commit.
        dry_run (`bool`): Only say what would be uploaded: nothing is written and no connection is made.
        max_attempts (`int`): Attempts before giving up; what earlier attempts uploaded is not sent again.
        first_wait_seconds (`float`): Wait before the second attempt, doubled after each.
        api ([`~huggingface_hub.HfApi`], *optional*): Client with endpoint and token.

    Raises:
        `ValueError`: if the directory has no model, the repository name is not `USER/NAME`, a file cannot be read, text by
            hand in a README would be lost, or the Hub refuses.
        [`FailedRun`]: if every attempt failed for a reason that could have passed.
    """
    if repo_id.count("/") != 1 or not all(repo_id.split("/")):
        raise ValueError(f"The repository is named USER/NAME, got {repo_id!r}.")
    validate_repo_id(repo_id)
    check_checkpoint(model_dir)
    check_described(model_dir, results, recipe)
    ours = kept_readme(model_dir)
    if dry_run:
        return PushResult(None, files_of_a_model(model_dir, described_files(model_dir, results, recipe)), 0)
    api = api or HfApi()
    num_retries = 0
    happened = "Nothing was uploaded"

    def with_retries(call: Callable[[], Any]) -> Any:
        nonlocal num_retries
        for attempt in range(1, max_attempts + 1):
            try:
                return call()
            except (HfHubHTTPError, httpx.TransportError, RuntimeError, ConnectionError) as error:
                if not can_pass(error):
                    raise ValueError(f"The upload to {repo_id} is refused: {error}") from error
                reason = " ".join(str(error).split()).rstrip(".")
                if attempt == max_attempts:
                    raise FailedRun(
                        f"The upload to {repo_id} failed {max_attempts} times, last with: {reason}. {happened}; "
                        f"`pacs-trl push --model {model_dir} --repo {repo_id}` resumes."
                    ) from error
                num_retries += 1
                wait = first_wait_seconds * 2 ** (attempt - 1)
                logger.warning(
                    f"Attempt {attempt} of {max_attempts} to upload to {repo_id} failed: {reason}. Trying again in "
                    f"{wait:g} s."
                )
                time.sleep(wait)

    url = with_retries(lambda: api.create_repo(repo_id, private=private, exist_ok=True))
    theirs = hand_written(with_retries(lambda: _repository_readme(api, repo_id, revision)), f"README.md of {repo_id}")
    kept = the_one_to_keep(ours, theirs, str(model_dir / README_FILE), repo_id)
    describe(model_dir, repo_id, kept, results=results, recipe=recipe)
    contents = published_contents(model_dir)
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in contents.items()]
    happened = "Files that were uploaded are kept and not sent again"
    title = commit_message or "Upload model, card, recipe and results"
    with_retries(lambda: api.create_commit(repo_id, operations, commit_message=title, revision=revision))
    return PushResult(str(url), list(contents), num_retries)


def can_pass(error: BaseException) -> bool:
    """Whether an upload error may be gone at the next attempt: connection errors and busy servers, not refusals."""
    if isinstance(error, HfHubHTTPError):
        return error.response is None or error.response.status_code in PASSING_STATUS
    if isinstance(error, RuntimeError) and error.__cause__ is not None:  # huggingface_hub wraps errors of one file
        return can_pass(error.__cause__)
    return isinstance(error, httpx.TransportError)


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
    result = push(
        args.model, args.repo, private=args.private, results=args.results, recipe=args.recipe, dry_run=args.dry_run
    )
    for name in result.files:
        print(name)
    if args.dry_run:
        print(f"{len(result.files)} files would be uploaded to {args.repo}; nothing was sent.")
    else:
        print(f"{result.url}: {len(result.files)} files, {result.num_retries} retries")
    return 0


def _repository_readme(api: HfApi, repo_id: str, revision: str | None) -> str | None:
    """README.md of the repository; None if it, or the branch, does not exist yet."""
    url = f"{api.endpoint}/{repo_id}/resolve/{quote(revision or 'main', safe='')}/{README_FILE}"
    response = get_session().get(url, headers=build_hf_headers(token=api.token), follow_redirects=True)
    try:
        hf_raise_for_status(response)
    except (RemoteEntryNotFoundError, RevisionNotFoundError):
        return None
    return response.content.decode("utf-8")
