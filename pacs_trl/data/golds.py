"""Gold answers that cannot be graded, or are graded otherwise than they are meant."""

import logging
import re
from collections.abc import Sequence
from typing import Any

from ..verification import Verifier, gold_texts


logger = logging.getLogger(__name__)

# Kinds of such golds, in the order of their counts.
KINDS = {
    "missing": "missing, so that their completions are masked out",
    "unreadable": "unreadable, so that no completion is graded correct unless its box has the same text",
    "e-notation": "in e-notation, which the protocols `authors` and `trl` misread",
    "words": "of three or more words, which no other words equal",
}

_MAX_SHOWN = 10
_E_NOTATION = re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_FORMULA_SIGN = re.compile(r"[\d\\$=]")


def is_in_e_notation(gold: Any) -> bool:
    """Whether a gold is text such as `1.5e-3`. Numbers of other types are converted to decimal notation."""
    return any(_E_NOTATION.fullmatch(text) for text in gold_texts(gold))


def golds_by_kind(golds: Sequence[Any], unreadable: Sequence[int]) -> dict[str, list[int]]:
    """Return the indices of golds of each of `KINDS`. Those that a verifier cannot read are `unreadable`; a gold may
    be of several kinds."""
    kinds: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for index in unreadable:
        kind = "unreadable" if gold_texts(golds[index]) else "missing"
        kinds[kind].append(index)
    for index, gold in enumerate(golds):
        if is_in_e_notation(gold):
            kinds["e-notation"].append(index)
        if any(_are_words(text) for text in gold_texts(gold)):
            kinds["words"].append(index)
    return kinds


def _are_words(text: str) -> bool:
    return len(_WORD.findall(text)) >= 3 and not _FORMULA_SIGN.search(text)


def report_golds(name: str, golds: Sequence[Any], verifier: Verifier, rows: Sequence[Any] | None = None) -> None:
    """
    Log a warning with the number of golds of each kind, and the row and text of the first of them.

    Args:
        name (`str`): Name of the set in the warning.
        golds (sequence): Gold answers, one per problem.
        verifier ([`Verifier`]): Says which golds it cannot read.
        rows (sequence, *optional*): What names the row of each gold; by default its position.
    """
    if rows is None:
        rows = range(len(golds))
    indices_by_kind = golds_by_kind(golds, verifier.unreadable_golds(golds))
    parts = []
    for kind, indices in indices_by_kind.items():
        if indices:
            examples = [f"row {rows[i]}: {golds[i]!r:.60}" for i in indices[:_MAX_SHOWN]]
            parts.append(f"{len(indices)} {KINDS[kind]} ({', '.join(examples)})")
    if parts:
        num_reported = len({index for indices in indices_by_kind.values() for index in indices})
        logger.warning(
            f"{num_reported} of {len(golds)} gold answers of {name} may be graded otherwise than they are meant: "
            f"{'; '.join(parts)}. Write the final answer only, numbers in decimal notation."
        )
