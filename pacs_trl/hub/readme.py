"""A README that people write and that we write: our part stands between two marks, everything else is theirs.

Metadata at the head is shared: what we know we set, other keys, further tags and the numbers of other models are kept. A file
without marks was written by hand, except the drafts of a card that TRL and PEFT write beside every saved model.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import ModelCard, ModelCardData

from ..redaction import published
from .files import README_FILE


BEGIN = "<!-- pacs_trl: written anew by every push, up to the end mark; text outside the marks is kept -->"
END = "<!-- pacs_trl: end -->"
_OURS = ("model_name", "base_model", "library_name", "pipeline_tag")
_SHARED = ("tags", "datasets", "model-index")  # lists that hold theirs and ours
_LICENSE = ("license", "license_name", "license_link")
_OUR_LICENSE = re.compile(r"^<!-- license: (.*) -->$", re.MULTILINE)  # another one in the metadata was written by hand
_HEAD = re.compile(r"\A\s*---[ \t]*\n(.*?)^---[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
_TRL_HEADINGS = ["Quick start", "Training procedure", "Framework versions", "Citations"]


class HandWritten(NamedTuple):
    """What people wrote: metadata, and the text before and behind our part."""

    metadata: dict[str, Any]
    before: str
    after: str

    @property
    def words(self) -> tuple[dict[str, Any], str, str]:
        """Without the metadata that both write, to compare with."""
        metadata = {key: value for key, value in self.metadata.items() if key not in (*_OURS, *_SHARED)}
        return metadata, self.before, self.after


NOTHING = HandWritten({}, "", "")


def kept_readme(model_dir: Path) -> HandWritten:
    """
    What was written by hand in the README of a directory.

    Raises:
        `ValueError`: if it cannot be told from our part, see [`hand_written`].
    """
    readme = model_dir / README_FILE
    if not readme.is_file():
        return NOTHING
    try:
        return hand_written(readme.read_text(encoding="utf-8"), str(readme))
    except UnicodeDecodeError as error:
        raise ValueError(f"{readme} is not UTF-8 text: {error}.") from error


def hand_written(text: str | None, where: str) -> HandWritten:
    """
    The part of a README that is not ours.

    Args:
        text (`str`, *optional*): The file; None if there is none.
        where (`str`): Its name, for errors.

    Raises:
        `ValueError`: if its marks are not one pair in order, or its head is no YAML mapping.
    """
    text = (text or "").replace("\r\n", "\n").removeprefix("\ufeff")
    head = _HEAD.match(text)
    body = (text[head.end() :] if head else text).strip()
    try:
        metadata = yaml.safe_load(head[1]) if head else {}
    except yaml.YAMLError as error:
        raise ValueError(f"The head of {where} is not YAML: {' '.join(str(error).split())}.") from error
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict):
        raise ValueError(f"The head of {where} must be a YAML mapping, got {type(metadata).__name__}.")
    _remove_marks_of_peft(metadata)
    if BEGIN not in body and END not in body:
        return NOTHING if _is_draft(metadata, body) else HandWritten(metadata, body, "")
    before, _, rest = body.partition(BEGIN)
    ours, _, after = rest.partition(END)
    if body.count(BEGIN) != 1 or body.count(END) != 1 or END in before:
        raise ValueError(
            f"{where} does not hold the two marks of our part once each and in order, so what was written by hand cannot be "
            f"told from it. Put {BEGIN!r} before our part and {END!r} behind it, or remove both and our part."
        )
    if metadata.get("license") in _OUR_LICENSE.findall(ours):
        metadata = {key: value for key, value in metadata.items() if key not in _LICENSE}
    return HandWritten(metadata, before.strip(), after.strip())


def the_one_to_keep(local: HandWritten, remote: HandWritten, local_name: str, remote_name: str) -> HandWritten:
    """
    What was written by hand in the model folder or in the repository.

    Raises:
        `ValueError`: if both hold text by hand, and not the same.
    """
    if remote.words == NOTHING.words:
        return local._replace(metadata={**remote.metadata, **local.metadata})
    if local.words in (NOTHING.words, remote.words):
        return remote._replace(metadata={**local.metadata, **remote.metadata})
    raise ValueError(
        f"{local_name} and the README.md of {remote_name} both hold text that was written by hand, and they differ; one of them "
        "would be lost. Nothing was uploaded. Remove the first to keep the repository's text, or delete README.md there to keep "
        "yours."
    )


def with_our_part(kept: HandWritten, card: ModelCard) -> str:
    """The README: what was written by hand around our card."""
    ours = {"model_name": card.data.model_name} | card.data.to_dict()
    decided = _LICENSE if "license" in kept.metadata else ()  # by hand
    ours = {key: value for key, value in ours.items() if key not in decided}
    metadata = ours | {key: value for key, value in kept.metadata.items() if key not in ours}
    for key in _SHARED:
        theirs = kept.metadata.get(key) or []
        theirs = theirs if isinstance(theirs, list) else [theirs]
        if key == "model-index":  # our earlier numbers are under our name, or under the one that the card had then
            names = (card.data.model_name, kept.metadata.get("model_name"))
            theirs = [e for e in theirs if not (isinstance(e, dict) and e.get("name") in names)]
        added = ours.get(key) or []
        metadata.pop(key, None)
        if theirs or added:
            metadata[key] = [*(item for item in theirs if item not in added), *added]
    head = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    text = card.text.strip().replace("<!-- pacs_trl", "&lt;!-- pacs_trl")  # a name or a prompt that looks like a mark
    parts = [kept.before, f"{BEGIN}\n\n{text}\n\n{END}", kept.after]
    return f"---\n{head}---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _remove_marks_of_peft(metadata: dict[str, Any]) -> None:
    """What PEFT sets in the head of any README beside an adapter: the path of its base, which may be one of this machine."""
    base = {"model_name_or_path": metadata.get("base_model")}
    if published(base) != base:
        del metadata["base_model"]
    if isinstance(metadata.get("tags"), list):
        metadata["tags"] = [tag for tag in metadata["tags"] if not str(tag).startswith("base_model:")]


def _is_draft(metadata: dict[str, Any], body: str) -> bool:
    """TRL's, with its headings and no other, or PEFT's, in which nothing was filled in: with more, it is a draft no more."""
    if not body.startswith("# Model Card for "):
        return False
    headings = re.findall(
        r"^#+ +(.*)$", re.sub(r"^```.*?^```", "", body, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    if "generated_from_trainer" in (metadata.get("tags") or []) and headings[1:] == _TRL_HEADINGS:
        return True
    added = set(body.splitlines()) - set(ModelCard.from_template(ModelCardData()).text.splitlines())
    return all(line == "### Framework versions" or line.startswith("- PEFT ") for line in added)
