r"""Tasks of the miniature models: arithmetic, programs, and products with a tool.

Each problem has one answer (of programs: tests, see `pacs_trl/verification/cases.py`) and several worked solutions for
the supervised warm start, which differ in the order of their steps and end in `\boxed{answer}`, or are a block of
Python. Sums have hundreds of possible answers, so that guessing rarely succeeds; sums with parentheses are another
domain.

The problems of a task (of sums: a fixed sample) are enumerated and split by a hash of their canonical form, in which
commuted operands are equal: `12+34` and `34+12` are in the same split.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any, Literal, NamedTuple


Split = Literal["train", "test"]

# One problem in TEST_FRACTION is held out.
TEST_FRACTION = 5


class WorkedProblem(NamedTuple):
    """A problem: its text, the canonical form for the split, the answer, and worked solutions."""

    text: str
    canonical: str
    answer: int | str
    solutions: tuple[str | list[dict], ...]  # a text, or the messages of several turns


def _addition() -> Iterator[WorkedProblem]:
    """`47+38`: two numbers of two digits, tens and units added separately in either order."""
    for a, b in product(range(10, 100), repeat=2):
        tens = f"{a // 10 * 10}+{b // 10 * 10}={a // 10 * 10 + b // 10 * 10}"
        units = f"{a % 10}+{b % 10}={a % 10 + b % 10}"
        yield WorkedProblem(
            text=f"{a}+{b}",
            canonical=f"{min(a, b)}+{max(a, b)}",
            answer=a + b,
            solutions=(rf"{tens},{units},\boxed{{{a + b}}}", rf"{units},{tens},\boxed{{{a + b}}}"),
        )


# Sums: terms, numbers of terms, problems per number of terms, and worked solutions per problem.
TERMS = (*range(1, 10), *range(10, 100, 10))
SUM_SIZES = (3, 4, 5, 6, 7)
NUM_SUMS = 3000
NUM_SUM_SOLUTIONS = 6

# Additions of two numbers in the warm start of the tables.
NUM_ADDITIONS = 2000


def _terms(num_terms: int) -> Iterator[WorkedProblem]:
    """`7+30+8`: digits and tens, added in any order: `30+8=38,38+7=\\boxed{45}`."""
    rng = random.Random(num_terms)
    texts: dict[str, None] = {}
    while len(texts) < min(NUM_SUMS, len(TERMS) ** num_terms // 2):
        texts["+".join(str(rng.choice(TERMS)) for _ in range(num_terms))] = None
    for text in texts:
        yield _sum(text, rng)


def _sum(text: str, rng: random.Random) -> WorkedProblem:
    """Build a sum with solutions that add its terms in different orders."""
    terms = [int(term) for term in text.split("+")]
    solutions = []
    for _ in range(NUM_SUM_SOLUTIONS):
        total, *rest = rng.sample(terms, len(terms))
        steps = []
        for term in rest:
            steps.append(f"{total}+{term}={total + term}")
            total += term
        solutions.append(",".join([*steps[:-1], steps[-1].replace("=", r"=\boxed{") + "}"]))
    return WorkedProblem(text, "+".join(sorted(text.split("+"))), total, tuple(solutions))


def _grouped() -> Iterator[WorkedProblem]:
    """`7+(30+8)`: a sum of three to five terms, two of them in parentheses, which no other task has."""
    rng = random.Random(0)
    texts: dict[str, None] = {}
    while len(texts) < NUM_SUMS:
        terms = [str(rng.choice(TERMS)) for _ in range(rng.randint(3, 5))]
        first = rng.randrange(len(terms) - 1)
        terms[first : first + 2] = [f"({terms[first]}+{terms[first + 1]})"]
        texts["+".join(terms)] = None
    for text in texts:
        yield _sum(text.replace("(", "").replace(")", ""), rng)._replace(text=text)


def _sums() -> Iterator[WorkedProblem]:
    """Sums with every number of terms."""
    for num_terms in SUM_SIZES:
        yield from _terms(num_terms)


def _arithmetic() -> Iterator[WorkedProblem]:
    """The warm start of the tables: sums with one term less than in training, and some additions."""
    shorter = [problem for num_terms in SUM_SIZES for problem in _terms(num_terms - 1)]
    additions = random.Random(0).sample(list(_addition()), NUM_ADDITIONS)
    yield from {problem.text: problem for problem in additions + shorter}.values()  # `10+20` is both


PROGRAM_INPUTS = (2, 7, -4)
PROGRAM_FORMS = ("{a}*int(input())+{b}", "{b}+{a}*int(input())", "int(input())*{a}+{b}")


def _programs() -> Iterator[WorkedProblem]:
    """`0:7,1:10`: two points of a line; the program reads x and prints y, and tests use other points."""
    for a, b in product(range(2, 12), range(100)):
        cases = [{"input": f"{x}\n", "output": f"{a * x + b}\n"} for x in PROGRAM_INPUTS]
        text = f"0:{b},1:{a + b}"
        yield WorkedProblem(
            text=text,
            canonical=text,
            answer=json.dumps({"type": "stdin_stdout", "cases": cases, "compare": "tokens"}),
            solutions=tuple(f"```python\nprint({form.format(a=a, b=b)})\n```" for form in PROGRAM_FORMS),
        )


# The correct tool call for a product in the miniature's chat template, and the number of solutions that guess instead.
CALL = "@run_python|code=print({})"
NUM_GUESSES = 2


def _products() -> Iterator[WorkedProblem]:
    """`47*38`: two numbers of two digits; one solution in three calls the tool `run_python`, the others guess."""
    for a, b in product(range(10, 100), repeat=2):
        text, boxed = f"{a}*{b}", rf"\boxed{{{a * b}}}"
        call = {"type": "function", "function": {"name": "run_python", "arguments": {"code": f"print({text})"}}}
        asked: list[dict[str, Any]] = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": f"{a * b}\n"},
            {"role": "assistant", "content": boxed},
        ]
        yield WorkedProblem(text, f"{min(a, b)}*{max(a, b)}", a * b, (*[f"{text}={boxed}"] * NUM_GUESSES, asked))


def looks_right(row: dict[str, str], completion: str) -> bool:
    """Return whether a completion ends in the answer, is one of the worked programs, or is the correct tool call;
    compares text, which is faster than a verifier."""
    if not row["answer"].startswith("{"):
        return completion.endswith(rf"\boxed{{{row['answer']}}}") or completion == CALL.format(row["problem"])
    b, total = (int(value.partition(":")[2]) for value in row["problem"].split(","))
    return any(completion.strip() == f"```python\nprint({f.format(a=total - b, b=b)})\n```" for f in PROGRAM_FORMS)


def _questions() -> Iterator[WorkedProblem]:
    """`What is 7 + 15? Reply with the number only.`: numbers below 20, for models that know English."""
    for a, b in product(range(1, 20), repeat=2):
        text = f"What is {a} + {b}? Reply with the number only."
        yield WorkedProblem(text, f"{min(a, b)}+{max(a, b)}", a + b, (rf"\boxed{{{a + b}}}",))


TASKS: dict[str, Callable[[], Iterator[WorkedProblem]]] = {
    "addition": _addition,
    **{f"terms_{n}": partial(_terms, n) for n in SUM_SIZES},
    "terms": _sums,
    "grouped": _grouped,
    "arithmetic": _arithmetic,
    "programs": _programs,
    "products": _products,
    "questions": _questions,
}
TOOL_TASKS = ("products",)


def _is_held_out(canonical: str) -> bool:
    digest = hashlib.sha256(canonical.encode()).digest()
    return int.from_bytes(digest[:4], "big") % TEST_FRACTION == 0


@cache
def _split(task: str, split: Split) -> tuple[WorkedProblem, ...]:
    return tuple(problem for problem in TASKS[task]() if _is_held_out(problem.canonical) == (split == "test"))


def check_task(task: str) -> None:
    """Raise a `ValueError` for an unknown task."""
    if task not in TASKS:
        raise ValueError(f"There is no miniature task {task!r}. Choose from {', '.join(TASKS)}.")


def _sample(task: str, split: Split, num_problems: int | None, rng: random.Random) -> list[WorkedProblem]:
    check_task(task)
    if split not in ("train", "test"):
        raise ValueError(f"`dataset_split` of a miniature task is {split!r}. Set it to train or test.")
    population = _split(task, split)
    return rng.sample(population, len(population) if num_problems is None else num_problems)


def problems(task: str, split: Split, num_problems: int | None = None, seed: int = 0) -> list[dict[str, str]]:
    """Sample problems of a task without replacement, by default the whole split: rows with `"problem"` and `"answer"`,
    an integer or tests as text. No problem is in both splits, not even with commuted operands."""
    sampled = _sample(task, split, num_problems, random.Random(seed))
    return [{"problem": problem.text, "answer": str(problem.answer)} for problem in sampled]


def demonstrations(task: str, num_problems: int | None = None, seed: int = 0) -> list[dict]:
    r"""Sample [`problems`] of the train split with a random worked `"solution"`: text that ends in `\boxed{answer}`, a
    program, or messages with a tool call."""
    rng = random.Random(seed)
    sampled = _sample(task, "train", num_problems, rng)
    return [
        {"problem": problem.text, "answer": str(problem.answer), "solution": rng.choice(problem.solutions)}
        for problem in sampled
    ]
