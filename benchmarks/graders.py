r"""Errors of graders on golds that are rewritten by rule.

    python -m benchmarks.graders                   # golds of tests/data, about five minutes on one core
    python -m benchmarks.graders --data FOLDER     # the same files, for example all of GSM8K
    python -m benchmarks.graders --examples 20     # also print that many errors of each grader

For each distinct gold of GSM8K, MATH-500, AIME 2024 and 2025, and AMC 23: the gold in three other spellings, which are
right (`\dfrac`, spacing, a unit, separators, ...), and up to ten near misses, which are wrong (another sign, a number
off by one, an inverted fraction, a missing member, a swapped tuple, ...). All rules work on the text of the gold. Half
of the completions end in a box, the others in "The answer is $...$.". The last table has the labels of
`tests/data/graded_answers.yaml`.
"""

import argparse
import json
import logging
import math
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from math_verify import parse, verify
from trl.rewards import accuracy_reward

from pacs_trl.verification import Outcome, Verifier, gold_texts


DATA = Path(__file__).parents[1] / "tests" / "data"
SETS = {
    "GSM8K": "gsm8k_test*.jsonl",
    "MATH-500": "math_500.jsonl",
    "AIME 2024": "aime_2024.jsonl",
    "AIME 2025": "aime_2025.jsonl",
    "AMC 23": "amc23.jsonl",
}
NUM_REWRITES, NUM_NEAR_MISSES = 3, 10

_INTEGER = re.compile(r"-?\d+")
_FRACTION = re.compile(r"\\d?frac\s*\{(-?\d+)\}\s*\{(\d+)\}")
_TUPLE = re.compile(r"(\\left)?\s*([(\[])(.+?,.+?)(\\right)?\s*([)\]])$", re.DOTALL)


def golds_of(folder: Path, pattern: str) -> list[str]:
    """Return the distinct golds of a file, in order."""
    (path,) = folder.glob(pattern)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return list(dict.fromkeys(gold_texts(row.get("answer", row.get("Answer")))[0] for row in rows))


def rewrites(gold: str) -> list[str]:
    """Return the gold in other spellings of the same answer."""
    braced = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", gold)
    digits = re.sub(r",\\!\s*|(?<=\d),(?=\d{3}(?!\d))", "", gold)
    texts = []
    if _INTEGER.fullmatch(digits) and abs(int(digits)) >= 1000:
        texts += [f"{int(digits):,}", f"{int(digits):,}".replace(",", "{,}"), f"{int(digits):,}".replace(",", r"\,")]
    elif _INTEGER.fullmatch(digits):
        texts += [f"{digits}.0", rf"{digits} \text{{ units}}", rf"\mathbf{{{digits}}}"]
    if _FRACTION.fullmatch(braced):
        texts += [_FRACTION.sub(r"\1/\2", braced), _FRACTION.sub(r"\\tfrac{ \1 }{ \2 }", braced)]
    if r"\frac" in braced:
        texts.append(braced.replace(r"\frac", r"\dfrac"))
    if r"\begin{pmatrix}" in gold:
        texts.append(gold.replace("pmatrix", "bmatrix"))
    if gold.startswith(r"\text{"):
        texts += [gold.replace(r"\text", r"\textbf"), gold.removeprefix(r"\text{").removesuffix("}")]
    if r"\circ" in gold:
        texts += [gold.replace(r"^\circ", "\u00b0"), gold.replace(r"^\circ", r"\text{ degrees}")]
    if r"\pi" in gold:
        texts.append(gold.replace(r"\pi", "\u03c0"))
    if r"\sqrt{" in gold:
        texts.append(re.sub(r"\\sqrt\{(\d+)\}", "\u221a\\1", gold))
    if "_" in gold:
        texts.append(re.sub(r"_\{?(\d)\}?", r"_{\1}", gold))
    if gold[:1] in "([" and not re.search(r"\\left|\\begin", gold):
        texts.append(re.sub(r"([(\[])", r"\\left\1", re.sub(r"([)\]])", r"\\right\1", gold)))
    texts += [gold.replace(" ", ""), re.sub(r"(?<=[\d\w)])\s*([-+=])\s*", r" \1 ", gold), rf"\displaystyle {gold}"]
    texts += [f"{gold}.", rf"\, {gold} \,", rf"{{{gold}}}"]
    if r"\text" in gold or r"\mbox" in gold or gold.startswith(r"\begin"):
        texts.remove(gold.replace(" ", ""))
    texts = [text for text in dict.fromkeys(texts) if text != gold]
    return texts[:NUM_REWRITES]


def near_misses(gold: str, others: list[str]) -> list[str]:
    """Return texts that look like the gold and are other answers. `others` are golds of the same set."""
    texts = []
    is_text = gold.startswith(r"\text")
    numbers = [] if is_text else list(re.finditer(r"\d+", re.sub(r",\\!\s*", "", gold)))
    plain = re.sub(r",\\!\s*", "", gold)
    if not is_text and r"\pm" not in gold and not re.fullmatch(r"[-{}\s0]*", gold):
        texts.append(plain.removeprefix("-") if plain.startswith("-") else _negated(plain))
    if fraction := _FRACTION.fullmatch(gold):
        texts.append(rf"\frac{{{fraction[2]}}}{{{fraction[1]}}}" if abs(int(fraction[1])) != int(fraction[2]) else "")
    if parts := _TUPLE.fullmatch(gold):
        items = _split_items(parts[3])
        if items[0].strip() != items[-1].strip():
            texts.append(gold.replace(parts[3], ",".join(items[::-1])))
        texts.append(gold.replace(parts[3], ",".join([*items, "7"])))
        if len(items) > 2:
            texts.append(gold.replace(parts[3], ",".join(items[:-1])))
        swapped = {"(": "[", "[": "("}[parts[2]]
        if len(items) == 2:
            texts.append(gold[: parts.start(2)] + swapped + gold[parts.end(2) :])
    elif "," in gold and not is_text and not re.search(r",\\!|\d,\d{3}", gold):
        items = gold.split(",")
        texts += [",".join(items[:-1]), ",".join(items[1:]), f"{gold}, 7"]
    if r"\cup" in gold:
        texts += [gold.split(r"\cup")[0], gold.replace(r"\cup", r"\cap")]
    if r"\begin{pmatrix}" in gold:
        rows = gold.removeprefix(r"\begin{pmatrix}").removesuffix(r"\end{pmatrix}").split(r"\\")
        if rows[0].strip() != rows[-1].strip():
            texts.append(r"\begin{pmatrix}" + r"\\".join(rows[::-1]) + r"\end{pmatrix}")
        texts.append(r"\begin{pmatrix}" + r"\\".join(rows[:-1]) + r"\end{pmatrix}")
    for change in (1, -1, 10, 2):
        for number in numbers:
            value = int(number.group()) + change
            if value >= 0:
                texts.append(f"{plain[: number.start()]}{value}{plain[number.end() :]}")
    for number in numbers:
        digits = number.group()
        texts.append(f"{plain[: number.start()]}{digits}0{plain[number.end() :]}")
        if len(digits) > 1 and digits[-1] != digits[-2] and not digits.startswith("0"):
            swapped_digits = f"{digits[:-2]}{digits[-1]}{digits[-2]}"
            texts.append(f"{plain[: number.start()]}{swapped_digits}{plain[number.end() :]}")
    if _INTEGER.fullmatch(plain) and int(plain):
        texts += [f"{plain}.5", rf"\frac{{1}}{{{plain}}}" if abs(int(plain)) > 1 else "3", f"{plain}, 7", f"{plain}1"]
    if r"\sqrt" in gold:
        texts.append(gold.replace(r"\sqrt", "", 1))
    texts += others[: NUM_NEAR_MISSES if is_text else 2]
    # A decimal zero at the end changes nothing, nor does a change of the base, which is no near miss of the number.
    texts = [text for text in dict.fromkeys(texts) if text and not _is_same(text, gold)]
    return texts[:NUM_NEAR_MISSES]


def _numbers(text: str) -> list[str]:
    return re.findall(r"\d+", text)


def _negated(text: str) -> str:
    is_sum = re.search(r"(?<=[\w}) ])[-+]", re.sub(r"\{[^{}]*\}", "", text)) or text.startswith("(")
    if "=" in text or r"\in" in text:
        left, relation, right = re.split(r"(=|\\in)", text, maxsplit=1)
        return text if right.strip() in ("0", "") else f"{left}{relation} {_negated(right.strip())}"
    if text.startswith(("(", "[", r"\left", r"\{", r"\begin")):
        return re.sub(r"\d", lambda match: f"-{match.group()}", text, count=1)
    return f"-({text})" if is_sum else f"-{text}"


def _split_items(text: str) -> list[str]:
    """Return the members of a tuple whose commas are in no brackets."""
    items, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return items


def _is_same(text: str, gold: str) -> bool:
    def plain(each: str) -> str:
        each = re.sub(r"\s|\\left|\\right|\\!|(?<=\d),(?=\d{3})|\+(?=0)", "", each.replace("--", ""))
        each = re.sub(r"(\.\d*?)0+(?!\d)", r"\1", each)
        return re.sub(r"(?<![\d.])0+(?=\d)", "", each).replace("-0", "0").removesuffix(".")

    return plain(text) == plain(gold)


def completions_of(gold: str, texts: list[str]) -> list[str]:
    """Return a completion for each text, in a box or after a phrase."""
    forms = ("Adding both sides, we get \\boxed{{{}}}.", "Adding both sides, we are done. The answer is ${}$.")
    first = len(gold) % 2
    return [forms[(first + index) % 2].format(text) for index, text in enumerate(texts)]


def grade_with_math_verify(completions: list[str], golds: list[str]) -> list[bool]:
    """Grade as math-verify's README does: `verify(parse(gold), parse(answer))`."""
    return [verify(parse(f"${gold}$"), parse(text)) for text, gold in zip(completions, golds, strict=True)]


def grade_with_trl(completions: list[str], golds: list[str]) -> list[bool]:
    messages = [[{"role": "assistant", "content": text}] for text in completions]
    return [label == 1.0 for label in accuracy_reward(messages, [f"${gold}$" for gold in golds])]


def grade_with(protocol: str) -> Callable[[list[str], list[str]], list[bool]]:
    def grade(completions: list[str], golds: list[str]) -> list[bool]:
        with Verifier(num_workers=1, protocol=protocol) as verifier:
            grades = verifier.grade_detailed(completions, golds)
        return [each.outcome is Outcome.CORRECT for each in grades]

    return grade


GRADERS = {
    "robust": grade_with("robust"),
    "authors": grade_with("authors"),
    "number": grade_with("number"),
    "math-verify": grade_with_math_verify,
    "TRL's accuracy_reward": grade_with_trl,
}


def wilson(count: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share by Wilson's score."""
    z = 1.959964
    share = count / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return max(0.0, middle - half), min(1.0, middle + half)


def cell(count: int, total: int) -> str:
    low, high = wilson(count, total)
    return f"{100 * count / total:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def pairs_of(golds: list[str]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (completion, gold) of rewritten golds and of near misses."""
    right, wrong = [], []
    for index, gold in enumerate(golds):
        steps = random.Random(index).sample(range(1, len(golds)), 20)
        others = [golds[(index + step) % len(golds)] for step in steps]
        others = [other for other in others if _numbers(other) != _numbers(gold) or not _numbers(gold)]
        right += [(text, gold) for text in completions_of(gold, rewrites(gold))]
        wrong += [(text, gold) for text in completions_of(gold, near_misses(gold, others))]
    return right, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the files of the benchmarks")
    parser.add_argument("--graders", nargs="+", choices=GRADERS, default=list(GRADERS))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--examples", type=int, default=0, help="errors to print for each grader and set")
    args = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    print("| golds | n | grader | rewritten golds rejected | near misses accepted | seconds |")
    print("| --- | ---: | --- | --- | --- | ---: |")
    for name in args.sets:
        golds = golds_of(args.data, SETS[name])
        right, wrong = pairs_of(golds)
        for grader in args.graders:
            start = time.perf_counter()
            labels = GRADERS[grader](*map(list, zip(*right + wrong)))
            seconds = time.perf_counter() - start
            rejected = [pair for pair, label in zip(right, labels) if not label]
            accepted = [pair for pair, label in zip(wrong, labels[len(right) :]) if label]
            cells = f"{cell(len(rejected), len(right))} | {cell(len(accepted), len(wrong))} | {seconds:.0f}"
            print(f"| {name} | {len(golds)} | {grader} | {cells} |", flush=True)
            for kind, pairs in (("rejected", rejected), ("accepted", accepted)):
                for completion, gold in pairs[: args.examples]:
                    print(f"  {kind}: gold {gold!r}, {completion!r}")
    table = yaml.safe_load((DATA / "graded_answers.yaml").read_text(encoding="utf-8"))
    rows = [row for kind in table if kind != "no clear answer" for row in table[kind]]
    print("\n| grader | graded answers | wrong labels |\n| --- | ---: | --- |")
    alternatives = [(index, gold) for index, row in enumerate(rows) for gold in gold_texts(row[0])]
    for grader in args.graders:
        labels = GRADERS[grader]([rows[index][1] for index, _ in alternatives], [gold for _, gold in alternatives])
        right_rows = {index for (index, _), label in zip(alternatives, labels) if label}
        errors = sum((index in right_rows) != bool(row[2]) for index, row in enumerate(rows))
        print(f"| {grader} | {len(rows)} | {cell(errors, len(rows))} |")


if __name__ == "__main__":
    main()
