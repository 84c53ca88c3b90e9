"""Results file: counts per problem, pass@k with intervals, settings, and provenance.

Report, model card, and Hub metadata are made from it without torch or the samples. Raise `RESULTS_SCHEMA` when a key
changes its meaning.
"""

import itertools
import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from .pass_at_k import pass_at_k, pass_interval
from .store import differences, identifying_facts


logger = logging.getLogger(__name__)

RESULTS_SCHEMA = 1
_REQUIRED_FIELDS = (
    *("method", "n", "k", "protocol", "benchmarks", "created"),
    *("model", "prompt_digest", "engine", "hardware", "versions", "commit"),
)
_COMPARED_FACTS = ("version", "digest", "num_problems")  # of the source of a benchmark


class GradedSample(NamedTuple):
    """A graded completion of the problem with the id `problem`; `outcome` is its label in [0, 1]: 1.0 correct, 0.0
    wrong, `None` if the gold answer is unreadable. `num_tokens` and `finish_reason` are those of [`Completion`]."""

    problem: str
    outcome: float | None
    num_tokens: int
    finish_reason: str


def summarize(problem_ids: Sequence[str], samples: Iterable[GradedSample], ks: Sequence[int]) -> dict[str, Any]:
    """
    Return counts and pass@k of one benchmark, from the samples that could be graded.

    Args:
        problem_ids (sequence of `str`): All problems, each with at least one sample.
        samples (iterable of [`GradedSample`]): Their samples, in any order.
        ks (sequence of `int`): Values of k.

    Returns:
        `dict`: `problems`, the counts of each problem in the order of `problem_ids`; `pass_at_k`, see
        [`pass_at_k_table`]; `excluded`, the number of problems that are left out of pass@k, because fewer than k of
        their samples are graded, by k where it is not 0; `unscorable`, the problems without a graded sample;
        `ungraded`, the number of samples that are not graded; `mean_tokens`, and `truncated_share` in [0, 1], of the
        samples of all problems.

    Raises:
        `ValueError`: if the largest k excludes all problems.
    """
    samples_of_problem: dict[str, list[GradedSample]] = {problem_id: [] for problem_id in problem_ids}
    for sample in samples:
        samples_of_problem[sample.problem].append(sample)
    problems: list[dict[str, Any]] = []
    for problem_id, generated in samples_of_problem.items():
        counts = {
            "id": problem_id,
            "n": len(generated),
            "c": sum(sample.outcome == 1.0 for sample in generated),
            "ungraded": sum(sample.outcome is None for sample in generated),
            "truncated": sum(sample.finish_reason == "length" for sample in generated),
            "mean_tokens": sum(sample.num_tokens for sample in generated) / len(generated),
        }
        problems.append(counts)
    num_excluded = {k: len(problems) - len(graded_counts(problems, k)) for k in ks}
    if num_excluded[max(ks)] == len(problems):
        raise UserError(
            f"No problem has {max(ks)} samples that could be graded. Check the gold answers, verification_protocol, "
            "and rewards that return nothing, or leave this value out of k."
        )
    num_graded = [problem["n"] - problem["ungraded"] for problem in problems]
    num_correct = [problem["c"] for problem in problems]
    num_truncated = sum(problem["truncated"] for problem in problems)
    return {
        "problems": problems,
        "unscorable": [problem["id"] for problem in problems if problem["ungraded"] == problem["n"]],
        "excluded": {str(k): number for k, number in num_excluded.items() if number},
        "ungraded": sum(problem["ungraded"] for problem in problems),
        "pass_at_k": pass_at_k_table(num_graded, num_correct, ks),
        "mean_tokens": float(np.mean([problem["mean_tokens"] for problem in problems])),
        "truncated_share": num_truncated / sum(problem["n"] for problem in problems),
    }


def graded_counts(problems: Iterable[dict[str, Any]], k: int) -> dict[str, tuple[int, int]]:
    """Return the numbers of graded and of correct samples by problem, without problems that have fewer than `k` graded
    ones, whose pass@k cannot be estimated. In `problems`, `n` counts all samples."""
    counts = {}
    for problem in problems:
        num_graded = problem["n"] - problem["ungraded"]
        if num_graded >= k:
            counts[problem["id"]] = (num_graded, problem["c"])
    return counts


def pass_at_k_table(n: Sequence[int], c: Sequence[int], ks: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return `{"k": {"value", "lower", "upper"}}`, pass@k in [0, 1] with intervals over the problems with `n >= k`,
    from the numbers of samples, `n`, and of correct ones, `c`, of each problem. Keys are strings, as in JSON."""
    num_graded, num_correct = np.asarray(n), np.asarray(c)
    table = {}
    # Values of k that exclude equally many problems exclude the same ones, and are computed together.
    for _, group in itertools.groupby(sorted(ks), key=lambda k: int((num_graded < k).sum())):
        ks_of_group = list(group)
        is_included = num_graded >= ks_of_group[0]
        interval = pass_interval(pass_at_k(num_graded[is_included], num_correct[is_included], ks_of_group))
        means, lowers, uppers = map(np.asarray, interval)
        for k, mean, lower, upper in zip(ks_of_group, means, lowers, uppers, strict=True):
            table[k] = {"value": float(mean), "lower": float(lower), "upper": float(upper)}
    return {str(k): table[k] for k in ks}


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write a results file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def check_results_are_kept(path: Path, benchmarks: Sequence[str]) -> None:
    """Raise a `ValueError` if a results file has a benchmark that is not among `benchmarks`, whose results would take
    its place."""
    if not path.is_file():
        return
    overwritten = [name for name in read_json(path)["benchmarks"] if name not in benchmarks]
    if overwritten:
        raise UserError(
            f"{path} has results of {', '.join(overwritten)}, which would be overwritten. Name all benchmarks in one "
            "evaluation, which uses the stored samples, or set another output_dir."
        )


class Document(dict):
    """A JSON object of the file `where`; a missing field raises a `ValueError` that names both."""

    def __init__(self, content: dict[str, Any], where: str):
        super().__init__(content)
        self.where = where

    def __missing__(self, field: str):
        raise UserError(f"{self.where} is damaged: it has no `{field}`. Create it again, or use a complete copy.")


def parse_json(text: str | bytes, where: str, fields: Iterable[str] = ()) -> Document:
    """Parse a JSON object as nested [`Document`]s. Raises a `ValueError` naming `where` if it is not such an object or
    lacks one of the `fields`."""
    problem = None
    try:
        content = json.loads(text, object_hook=lambda fields_of_object: Document(fields_of_object, where))
    except ValueError as error:  # JSON or UTF-8
        problem = str(error)
    else:
        if not isinstance(content, Document):
            problem = f"{content!r:.60}"
    if problem is not None:
        raise UserError(
            f"{where} is damaged, or of another kind: it is not a JSON object ({problem}). Create it again, or "
            "correct the name."
        )
    for field in fields:
        content[field]  # raises an error if it is missing
    return content


def read_json(path: Path, fields: Iterable[str] = ()) -> Document:
    """Read a JSON object from a file, see [`parse_json`]."""
    return parse_json(path.read_bytes(), str(path), fields)


def read_results(path: str | Path) -> Document:
    """Read a results file, or that of a directory. Raises a `ValueError` if there is none, or it is damaged, has
    another schema version, or a benchmark has no graded problem."""
    path = Path(path)
    file = path / "results.json" if path.is_dir() else path
    if not file.is_file():
        raise _error_without_results(path)
    results = read_json(file)
    if results["schema_version"] != RESULTS_SCHEMA:
        raise UserError(
            f"{path}: its schema is {results['schema_version']}, not {RESULTS_SCHEMA}. Evaluate again, which uses the "
            "stored samples."
        )
    for field in _REQUIRED_FIELDS:
        results[field]  # raises an error if it is missing
    ks = results["k"]
    benchmarks = results["benchmarks"].values()
    if not benchmarks or not all(ks and graded_counts(benchmark["problems"], max(ks)) for benchmark in benchmarks):
        raise UserError(f"{path} has no benchmark, or one without graded problems. Evaluate again.")
    return results


def _error_without_results(path: Path) -> UserError:
    """Return the error for a path that is no results file and no directory with one."""
    state = f"does not exist in {Path.cwd()}"
    hint = ""
    if path.is_dir():
        state = "contains no results.json"
        if any(path.glob("trainer_state.json")) or any(path.glob("checkpoint-*/trainer_state.json")):
            hint = f" It is a training run: name it with --training METHOD={path}."
    return UserError(f"{str(path)!r} {state}. Name results.json of `pacs-trl evaluate`, or its directory.{hint}")


def instruction_of(result: dict[str, Any], benchmark: str) -> str | None:
    """Return the instruction of a benchmark, `None` for whole prompts. Files of earlier versions have one instruction
    for all benchmarks, which some replace with their own."""
    return result["benchmarks"][benchmark].get("instruction", _instruction_set(result))


def prompts_of(results: Sequence[dict[str, Any]]) -> list[tuple[list[str], str | None]]:
    """Return each instruction of results files with the titles of its benchmarks, in order of first appearance."""
    titles_by_instruction: dict[str | None, list[str]] = {}
    for result in results:
        for benchmark, entry in result["benchmarks"].items():
            titles = titles_by_instruction.setdefault(instruction_of(result, benchmark), [])
            if entry["title"] not in titles:
                titles.append(entry["title"])
    return [(titles, instruction) for instruction, titles in titles_by_instruction.items()]


def require_same_protocol(results: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Check that results can be compared: equal sampling settings, prompt, verifier, and, for each benchmark that two
    files share, instruction, version, and problems; a `ValueError` names the two files and every difference. The
    number of samples and the engine may differ, since pass@k is unbiased in n."""
    # The first file with a protocol, and with each benchmark: later ones are compared with it.
    first: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, result in zip(names, results, strict=True):
        for key in ("protocol", *result["benchmarks"]):
            first_name, first_result = first.setdefault(key, (name, result))
            if key == "protocol":
                first_facts = _without_instruction(first_result["protocol"])
                facts = _without_instruction(result["protocol"])
            else:
                first_facts = _benchmark_facts(first_result, key)
                facts = _benchmark_facts(result, key)
                first_states_instruction = "instruction" in first_result["benchmarks"][key]
                states_instruction = "instruction" in result["benchmarks"][key]
                if states_instruction != first_states_instruction:
                    # One of an earlier version states only what was set, so that is compared.
                    first_facts["instruction"] = _instruction_set(first_result)
                    facts["instruction"] = _instruction_set(result)
            lines = differences(first_facts, facts, key=key)
            if lines:
                raise UserError(
                    f"{first_name} and {name} were measured with different protocols:\n  "
                    + "\n  ".join(lines)
                    + "\nEvaluate one of them again with the protocol of the other."
                )


def _benchmark_facts(result: dict[str, Any], benchmark: str) -> dict[str, Any]:
    """Return the facts about a benchmark that must be equal in compared files."""
    source = result["benchmarks"][benchmark]["source"]
    facts = {fact: source[fact] for fact in _COMPARED_FACTS}
    facts["instruction"] = instruction_of(result, benchmark)
    return facts


def _instruction_set(result: dict[str, Any]) -> str | None:
    """Return the instruction that the user set for all benchmarks."""
    return result["protocol"].get("prompt", {}).get("instruction")


def _without_instruction(protocol: dict[str, Any]) -> dict[str, Any]:
    """Return a protocol without the instruction, which is compared for each benchmark."""
    prompt = {key: value for key, value in protocol.get("prompt", {}).items() if key != "instruction"}
    return protocol | {"prompt": prompt}


def require_different_evaluations(results: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Check that no file, or copy of it, is named twice: it would count as two runs without any spread. A `ValueError`
    names both."""
    for i, (name, result) in enumerate(zip(names, results, strict=True)):
        if result in results[:i]:
            first_name = names[results.index(result)]
            raise UserError(f"{first_name} and {name} are one evaluation. Name it once.")


def require_chosen_labels(results: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Check that files with one label are runs of one method: they name the same model, or a user has chosen the
    label. A `ValueError` names two files that only share the default label of different models; of files of earlier
    versions, which do not say who chose the label, a warning does."""
    first: dict[str, tuple[str, dict[str, Any]]] = {}  # by label
    for name, result in zip(names, results, strict=True):
        other_name, other = first.setdefault(result["method"], (name, result))
        if _is_one_model(other["model"], result["model"]):
            continue
        share_a_label = (
            f"{other_name} and {name} have the label {result['method']!r}, which is that of the directory or the "
            "name, and measure different models."
        )
        if other.get("method_is_default") or result.get("method_is_default"):
            raise UserError(
                f"{share_a_label} Evaluate again with --method LABEL, which keeps the samples: runs of one method "
                "share a label, two methods have two."
            )
        if _may_have_default_label(other) or _may_have_default_label(result):
            logger.warning(
                f"{share_a_label} They count as runs of one method. If they are two, evaluate again with --method "
                "LABEL, which keeps the samples."
            )


def _is_one_model(model: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two identities may be those of one model. Of a model of a server only the name is known, since
    one model may be served at several addresses."""
    if "server" in model or "server" in other:
        return model.get("name") == other.get("name")
    return identifying_facts(model) == identifying_facts(other)


def _may_have_default_label(result: dict[str, Any]) -> bool:
    """Return whether a file of an earlier version, which does not say who chose the label, has that of its model."""
    return "method_is_default" not in result and result["method"] == result["model"].get("name", "").split("/")[-1]
