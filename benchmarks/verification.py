"""Speed of the verifier compared with TRL's `accuracy_reward`, on the same completions, in one run.

    python -m benchmarks.verification                  # clean text, several rounds, both graders in turn
    python -m benchmarks.verification --hostile        # also with 2 % hostile completions (TRL needs minutes)
    python -m benchmarks.verification --robust         # protocol `robust` against `authors`, in turn
    python -m benchmarks.verification --protocols   # labels of the two protocols on the rows of the tests, no timing

Completions are assembled from the reference solutions of MATH-500: reasoning from other problems, then a boxed answer
that is correct in 60 % of them and otherwise one of three mistakes per problem (a changed number). There are 500
problems with 8 completions each, with log-normal lengths of about 4,000 characters on average; each round has other
texts and mistakes. Hostile completions end in an answer of `tests/data/hostile.jsonl` for which `accuracy_reward`
times out.
"""

import argparse
import json
import logging
import random
import re
import statistics
import time
from pathlib import Path

from trl.rewards import accuracy_reward

from pacs_trl.verification import Grade, Verifier


DATA = Path(__file__).parents[1] / "tests" / "data"
NUM_WORKERS, MEAN_CHARACTERS, HOSTILE_SHARE = 2, 4000, 0.02


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def realistic_completions(num_completions: int, seed: int) -> tuple[list[str], list[str]]:
    """Return completions and gold answers, grouped by problem."""
    rng = random.Random(seed)
    problems = read_jsonl(DATA / "math_500.jsonl")
    reasoning = [re.sub(r"\\boxed", "", problem["solution"]) for problem in problems]
    completions, golds = [], []
    for index in range(num_completions):
        problem = problems[index // 8 % len(problems)]
        if index % 8 == 0:
            mistakes = [mistaken(problem["answer"], rng) for _ in range(3)]
        length = int(0.88 * MEAN_CHARACTERS * rng.lognormvariate(0.0, 0.5))  # exp(0.5**2 / 2) = 1 / 0.88
        text = ""
        while len(text) < length:
            text += rng.choice(reasoning) + "\n\n"
        answer = problem["answer"] if rng.random() < 0.6 else rng.choice(mistakes)
        completions.append(f"{text[:length]}\n\nTherefore the answer is $\\boxed{{{answer}}}$.")
        golds.append(problem["answer"])
    return completions, golds


def mistaken(answer: str, rng: random.Random) -> str:
    """Return the answer with one of its numbers changed, or with an extra summand if it contains no number."""
    numbers = list(re.finditer(r"\d+", answer))
    if not numbers:
        return f"{answer} + {rng.randrange(2, 100)}"
    number = rng.choice(numbers)
    return f"{answer[: number.start()]}{int(number.group()) + rng.randrange(1, 100)}{answer[number.end() :]}"


def with_hostile(completions: list[str]) -> list[str]:
    """Replace the end of evenly spaced completions with answers on which a grader hangs."""
    hostile = [
        "".join(text * n for text, n in row["parts"]) for row in read_jsonl(DATA / "hostile.jsonl") if row["hangs"]
    ]
    random.Random(0).shuffle(hostile)
    result = list(completions)
    for number in range(round(HOSTILE_SHARE * len(result))):
        place = int((number + 0.5) / HOSTILE_SHARE)
        result[place] = f"{result[place].rpartition('Therefore')[0]}{hostile[number % len(hostile)]}"
    return result


def time_trl(completions: list[str], golds: list[str]) -> tuple[float, float, list[float | None]]:
    """Return the total seconds, the seconds of the slowest completion, and the rewards."""
    rewards, slowest = [], 0.0
    start = time.perf_counter()
    for text, gold in zip(completions, golds, strict=True):
        item_start = time.perf_counter()
        rewards += accuracy_reward([[{"role": "assistant", "content": text}]], [f"${gold}$"])
        slowest = max(slowest, time.perf_counter() - item_start)
    return time.perf_counter() - start, slowest, rewards


def time_ours(verifier: Verifier, completions: list[str], golds: list[str]) -> tuple[float, float, list[Grade]]:
    start = time.perf_counter()
    grades = verifier.grade_detailed(completions, golds)
    return time.perf_counter() - start, max(grade.seconds for grade in grades), grades


def compare(name: str, verifier: Verifier, batches: list[tuple[list[str], list[str]]]) -> None:
    """Time both graders on each batch, in alternating order."""
    ratios = []
    for number, (completions, golds) in enumerate(batches):
        print(f"{name}: {len(completions)} completions of {statistics.mean(map(len, completions)):.0f} characters")
        measured = {}
        for grader in ("TRL", "ours") if number % 2 == 0 else ("ours", "TRL"):
            graded = time_trl(completions, golds) if grader == "TRL" else time_ours(verifier, completions, golds)
            seconds, slowest, results = measured[grader] = graded
            assert len(results) == len(completions)
            rate = len(completions) / seconds
            print(f"  {grader:5}{seconds:9.2f} s{rate:9.1f} items/s   slowest item {slowest:6.2f} s", flush=True)
        ratios.append(measured["TRL"][0] / measured["ours"][0])
    print(f"{name}: {', '.join(f'{ratio:.2f}x' for ratio in ratios)}; median {statistics.median(ratios):.2f}x TRL\n")


def compare_protocols(batches: list[tuple[list[str], list[str]]]) -> None:
    """Time protocols `robust` and `authors` on each batch, in turn, with new workers and without cache."""
    ratios = []
    for number, (completions, golds) in enumerate(batches):
        seconds = {}
        for protocol in ("robust", "authors") if number % 2 == 0 else ("authors", "robust"):
            with Verifier(num_workers=NUM_WORKERS, protocol=protocol) as verifier:
                verifier.grade(["\\boxed{1}"], ["1"])
                seconds[protocol], slowest, _ = time_ours(verifier, completions, golds)
            rate = len(completions) / seconds[protocol]
            print(f"  {protocol:8}{rate:9.1f} items/s   slowest item {slowest:6.2f} s", flush=True)
        ratios.append(seconds["authors"] / seconds["robust"])
    print(f"{', '.join(f'{ratio:.2f}x' for ratio in ratios)}; median {statistics.median(ratios):.2f}x authors\n")


def print_protocols() -> None:
    """Print the labels (1 / 0 / None) of the two protocols on reference answers, all of which are correct."""
    math, aime = read_jsonl(DATA / "math_500.jsonl"), read_jsonl(DATA / "aime_2024.jsonl")
    gsm8k = [row["answer"] for row in read_jsonl(DATA / "gsm8k_test_200.jsonl")]
    golds, integers = [row["answer"] for row in math], [str(row["Answer"]) for row in aime]
    cases = {
        "MATH-500, boxed gold against gold": ([f"\\boxed{{{gold}}}" for gold in golds], golds),
        "MATH-500, solution against gold": ([row["solution"] for row in math], golds),
        "MATH-500, `The answer is $gold$`": ([f"The answer is ${gold}$" for gold in golds], golds),
        "AIME 2024, solution against gold": ([row["Solution"] for row in aime], integers),
        "AIME 2024, `The answer is gold`": ([f"The answer is {gold}" for gold in integers], integers),
        "GSM8K, reference text against gold": (gsm8k, [text.rpartition("####")[2].strip() for text in gsm8k]),
    }
    print("| rows | n | authors: 1 / 0 / None | trl: 1 / 0 / None |\n| --- | ---: | ---: | ---: |")
    with Verifier(NUM_WORKERS, protocol="authors") as authors, Verifier(NUM_WORKERS, protocol="trl") as trl:
        for name, (completions, solutions) in cases.items():
            cells = []
            for verifier in (authors, trl):
                labels = verifier.grade(completions, solutions)
                cells.append(" / ".join(str(labels.count(label)) for label in (1.0, 0.0, None)))
            print(f"| {name} | {len(completions)} | {cells[0]} | {cells[1]} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-completions", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5, help="rounds on clean text")
    parser.add_argument("--hostile", action="store_true", help="one round with hostile completions as well")
    parser.add_argument("--robust", action="store_true", help="compare protocols `robust` and `authors` instead")
    parser.add_argument("--protocols", action="store_true", help="print a table of labels instead")
    args = parser.parse_args()
    if args.protocols:
        print_protocols()
        return

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # every timeout of TRL's reward prints its completion
    batches = [realistic_completions(args.num_completions, seed) for seed in range(args.rounds)]
    if args.robust:
        compare_protocols(batches)
        return
    start = time.perf_counter()
    with Verifier(num_workers=NUM_WORKERS, protocol="authors") as verifier:
        verifier.cache_size = 0
        verifier.grade(["\\boxed{1}"], ["1"])
        print(f"start-up of {NUM_WORKERS} workers, until the first label: {time.perf_counter() - start:.2f} s")
        warm_up = realistic_completions(400, seed=-1)  # the LaTeX grammar fills its tables
        time_trl(*warm_up)
        time_ours(verifier, *warm_up)
        compare("clean text", verifier, batches)
        if args.hostile:
            completions, golds = batches[0]
            compare(f"{HOSTILE_SHARE:.0%} hostile", verifier, [(with_hostile(completions), golds)])


if __name__ == "__main__":
    main()
