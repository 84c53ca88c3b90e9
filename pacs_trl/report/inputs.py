"""The files that report, model card and upload are made from, checked as they are read.

Files of a run that was cut off, edited or copied in part lack fields. What is missing is said in one line that names file and field,
before anything is written. A shape is plain data: a mapping of fields to shapes, a list of one shape for a list that is not
empty, or types. Needs neither torch nor the samples.
"""

import json
from pathlib import Path
from types import NoneType
from typing import Any

from ..evaluation.results import read_results


NUMBER = (int, float)
_PROBLEM = {"id": str, "n": int, "c": int, "ungraded": int}
_PASS_AT_K = {"value": NUMBER, "lower": (*NUMBER, NoneType), "upper": (*NUMBER, NoneType)}
# What a table of pass@k needs of a benchmark.
_MEASURED = {"title": str, "source": dict, "problems": [_PROBLEM], "pass_at_k": dict}
_DESCRIBED = {
    "source": {"version": int, "digest": str, "num_problems": int},
    "mean_tokens": NUMBER,
    "truncated_share": NUMBER,
    "answer_entropy": NUMBER,
}
_RESULTS = {"method": str, "n": int, "k": [int], "protocol": dict, "benchmarks": dict}
_HARDWARE = {"machine": str, "cpu_cores": int, "gpus": list}
_CIRCUMSTANCES = {
    "created": str,
    "model": {"name": str},
    "prompt_digest": str,
    "engine": {"name": str},
    "protocol": {
        "sampling": {"temperature": NUMBER, "top_p": NUMBER, "top_k": int, "max_new_tokens": int},
        "prompt": {"instruction": (str, NoneType), "system_prompt": (str, NoneType)},
        "verifier": {"name": str, "version": str, "protocol": str},
    },
    "hardware": _HARDWARE,
    "versions": dict,
    "commit": (str, NoneType),
}
_TRAINING = {"created": str, "num_processes": int, "hardware": _HARDWARE, "commit": (str, NoneType), "versions": dict}
# What our trainers add to it.
_OF_TRAINER = {
    "distributed": str,
    "paper": dict,
    "settings": dict,
    "tags": list,
    "example": {"prompt": (str, list), "max_new_tokens": (int, NoneType), "chat_template_kwargs": (dict, NoneType)},
}


def require(value: Any, shape: Any, where: str, *, field: str = "") -> None:
    """
    Refuse data that lacks something.

    Args:
        value (`Any`): Parsed JSON or YAML.
        shape (`Any`): What it must hold, see above; fields that are not named may hold anything.
        where (`str`): The file, for the error.

    Raises:
        `ValueError`: naming the file and the first field that is missing or of another type.
    """
    expected = dict if isinstance(shape, dict) else list if isinstance(shape, list) else shape
    if not isinstance(value, expected):
        names = " or ".join(t.__name__ for t in (expected if isinstance(expected, tuple) else (expected,)))
        raise ValueError(f"{where} is damaged: {field or 'its content'} must be {names}, got {str(value)[:60]!r}.")
    if isinstance(shape, dict):
        for name, inner in shape.items():
            path = f"{field}.{name}" if field else name
            if name not in value:
                raise ValueError(
                    f"{where} is damaged: it has no `{path}`. Make it again, or take it from a whole copy."
                )
            require(value[name], inner, where, field=path)
    if isinstance(shape, list):
        if not value:
            raise ValueError(f"{where} is damaged: `{field}` is empty.")
        for i, inner in enumerate(value):
            require(inner, shape[0], where, field=f"{field}[{i}]")


def read_measured(path: str | Path) -> dict[str, Any]:
    """
    A results file that has what tables of pass@k need.

    Raises:
        `ValueError`: if it cannot be read, has no benchmark, or lacks a field.
    """
    results, where = read_results(path), str(path)
    require(results, _RESULTS, where)
    if not results["benchmarks"]:
        raise ValueError(f"{where} is damaged: `benchmarks` is empty.")
    for name, entry in results["benchmarks"].items():
        field = f"benchmarks.{name}"
        require(entry, _MEASURED, where, field=field)
        require(entry["pass_at_k"], {str(k): _PASS_AT_K for k in results["k"]}, where, field=f"{field}.pass_at_k")
        for i, p in enumerate(entry["problems"]):
            if not 0 <= p["c"] <= p["n"] or p["n"] < max(results["k"]):
                raise ValueError(
                    f"{where} is damaged: {field}.problems[{i}] has c = {p['c']} right of n = {p['n']} samples, with k up to "
                    f"{max(results['k'])}."
                )
        if all(p["ungraded"] for p in entry["problems"]):
            raise ValueError(f"{where} is damaged: {field}.problems has none that was graded.")
    return results


def read_described(path: str | Path) -> dict[str, Any]:
    """As [`read_measured`], with everything that says how the numbers were made."""
    results = read_measured(path)
    require(results, _CIRCUMSTANCES, str(path))
    for name, entry in results["benchmarks"].items():
        require(entry, _DESCRIBED, str(path), field=f"benchmarks.{name}")
    return results


def read_json(path: Path, shape: Any) -> Any:
    """
    A JSON file of a given shape.

    Raises:
        `ValueError`: if it is not JSON or has another shape.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSON or UTF-8
        raise ValueError(f"{path} is damaged: it is not JSON ({error}).") from error
    require(content, shape, str(path))
    return content


def read_log_history(path: Path) -> list[dict[str, Any]]:
    """The log of a `trainer_state.json`; empty for a run that has logged nothing yet."""
    history = read_json(path, {"log_history": list})["log_history"]
    for i, log in enumerate(history):
        require(log, {"step": int}, str(path), field=f"log_history[{i}]")
    return history


def read_training_facts(path: Path) -> dict[str, Any]:
    """A `provenance.json`: what `pacs_trl.evaluation.provenance.training_facts` gathers, and what a trainer adds."""
    facts = read_json(path, _TRAINING)
    require(facts, {name: shape for name, shape in _OF_TRAINER.items() if name in facts}, str(path))
    return facts


def read_diversity(path: Path) -> dict[str, Any]:
    """A file of `experiments/diversity.py`, as far as its figure needs it."""
    diversity = read_json(path, {"models": [{"method": str, "mean": NUMBER, "points": list}], "explained": [NUMBER]})
    for i, model in enumerate(diversity["models"]):
        for j, point in enumerate(model["points"]):
            require(point, [NUMBER], str(path), field=f"models[{i}].points[{j}]")
    if len(diversity["explained"]) < 2 or any(len(p) != 2 for m in diversity["models"] for p in m["points"]):
        raise ValueError(f"{path} is damaged: `explained` and every point of `models` need two components.")
    if not any(model["points"] for model in diversity["models"]):
        raise ValueError(f"{path} is damaged: no model has `points`.")
    return diversity
