"""A README that people write and that we write: our part stands between two marks, everything else is theirs.

Metadata at the head is shared: what we know we set, other keys, further tags and the numbers of other models are kept. A file
without marks was written by hand, except TRL's draft of a card, which every saved checkpoint writes anew.
"""

import re
from typing import Any, NamedTuple

import yaml
from huggingface_hub import ModelCard


BEGIN = "<!-- pacs_trl: written anew by every push, up to the end mark; text outside the marks is kept -->"
END = "<!-- pacs_trl: end -->"
_OURS = ("model_name", "base_model", "library_name", "pipeline_tag")
_SHARED = ("tags", "datasets", "model-index")  # lists that hold theirs and ours
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
    if BEGIN not in body and END not in body:
        return NOTHING if _is_draft_of_trl(metadata, body) else HandWritten(metadata, body, "")
    before, _, rest = body.partition(BEGIN)
    _, _, after = rest.partition(END)
    if body.count(BEGIN) != 1 or body.count(END) != 1 or END in before:
        raise ValueError(
            f"{where} does not hold the two marks of our part once each and in order, so what was written by hand cannot be "
            f"told from it. Put {BEGIN!r} before our part and {END!r} behind it, or remove both and our part."
        )
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
    ours = card.data.to_dict()
    metadata = {**kept.metadata, **ours}
    for key in _SHARED:
        theirs = kept.metadata.get(key) or []
        theirs = theirs if isinstance(theirs, list) else [theirs]
        if key == "model-index":  # our numbers of an earlier push are under our name
            theirs = [e for e in theirs if not (isinstance(e, dict) and e.get("name") == card.data.model_name)]
        added = ours.get(key) or []
        metadata.pop(key, None)
        if theirs or added:
            metadata[key] = [*(item for item in theirs if item not in added), *added]
    head = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    parts = [kept.before, f"{BEGIN}\n\n{card.text.strip()}\n\n{END}", kept.after]
    return f"---\n{head}---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _is_draft_of_trl(metadata: dict[str, Any], body: str) -> bool:
    """With TRL's headings and no other: one that got a section by hand is no draft any more."""
    headings = re.findall(
        r"^#+ +(.*)$", re.sub(r"^```.*?^```", "", body, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    is_generated = "generated_from_trainer" in (metadata.get("tags") or [])
    return is_generated and body.startswith("# Model Card for ") and headings[1:] == _TRL_HEADINGS
