"""A model card whose numbers come from results.json, and the same numbers as metadata that the Hub can read.

The card has a table for people, `model-index` for the model page, and one `.eval_results/*.yaml` per Hub benchmark. Each number
travels with n, sampler, prompt digest, verifier version and interval: without them it could not be compared with anything.
"""

import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml

from ..redaction import published
from ..report import tables
from ..report.tables import one_line


TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"
RECIPE_FILE = "recipe.yaml"
TRAINING_FACTS_FILE = "provenance.json"
TRAINING_FIGURE = "training.png"
EVAL_RESULTS_FOLDER = ".eval_results"

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

CITATION = """\
@article{li2025implicit,
    title  = {{Implicit Actor Critic Coupling via a Supervised Learning Framework for RLVR}},
    author = {Jiaming Li and Longze Chen and Ze Gong and Yukun Chen and Lu Wang and Wanwei He and Run Luo and Min Yang},
    year   = 2025,
    eprint = {arXiv:2509.02522},
}"""


class CardInputs(NamedTuple):
    """
    What a card is written from; everything may be missing.

    - `results`: a parsed results.json.
    - `recipe`: the settings of the training run; what must not be shown is left out here.
    - `training`: a parsed provenance.json: commit, versions and hardware of the training run.
    - `is_adapter`: whether the weights are an adapter, which needs its base model.
    - `has_training_figure`: whether `training.png` lies beside the card.
    - `tags`: further tags of the model page.
    """

    results: dict[str, Any] | None = None
    recipe: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    is_adapter: bool = False
    has_training_figure: bool = False
    tags: Sequence[str] = ()


def build_card(model_name: str, inputs: CardInputs) -> ModelCard:
    """
    The model card of one checkpoint.

    Args:
        model_name (`str`): Title of the card and name in `model-index`.
        inputs ([`CardInputs`]): What is known about the model.

    Returns:
        [`~huggingface_hub.ModelCard`], ready to `save`.
    """
    results, recipe = inputs.results, published(inputs.recipe or {})
    model_name = one_line(model_name)
    base_model = recipe.get("model_name_or_path")
    base_model = base_model if _is_hub_id(base_model) else None
    dataset_name = recipe.get("dataset_name")
    dataset_name = None if dataset_name is None else one_line(str(dataset_name)).replace("`", "'")
    method = one_line(str(recipe.get("method", "pacs"))).upper()
    data = ModelCardData(
        model_name=model_name,
        base_model=base_model,
        datasets=[dataset_name] if _is_hub_id(dataset_name) else None,
        library_name="peft" if inputs.is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=sorted({"trl", method.lower(), "arxiv:2509.02522", *inputs.tags}),
        eval_results=model_index(results) if results else None,
    )
    facts = _result_facts(results) if results else {"tables": None}
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        model_name=model_name,
        base_model=base_model,
        dataset_name=dataset_name,
        method=method,
        has_recipe=inputs.recipe is not None,
        training=_training_facts(inputs.training) if inputs.training else None,
        training_figure=TRAINING_FIGURE if inputs.has_training_figure else None,
        citation=CITATION if method == "PACS" else None,
        **facts,
    )


def model_index(results: dict[str, Any]) -> list[EvalResult]:
    """One `model-index` entry per benchmark and k, percent."""
    entries = []
    for name, entry in results["benchmarks"].items():
        source = entry["source"]
        for k, cell in entry["pass_at_k"].items():
            entries.append(
                EvalResult(
                    task_type="text-generation",
                    task_name="Mathematical reasoning",
                    dataset_type=source.get("hub_id") or name,
                    dataset_name=entry["title"],
                    dataset_config=source.get("config"),
                    dataset_split=source.get("split"),
                    dataset_revision=source.get("revision"),
                    metric_type=f"pass@{k}",
                    metric_name=f"pass@{k}",
                    metric_value=round(100 * cell["value"], 2),
                    metric_args={
                        "n": results["n"],
                        "k": int(k),
                        "interval_95": [round(100 * cell["lower"], 2), round(100 * cell["upper"], 2)],
                        **results["protocol"]["sampling"],
                        "prompt_digest": results["prompt_digest"],
                        "problems_digest": source["digest"],
                        "verifier": _verifier_text(results),
                    },
                )
            )
    return entries


def hub_evaluations(results: dict[str, Any]) -> dict[str, str]:
    """
    Files for the Hub's evaluation results, path in the repository to content: pass@1 of every benchmark that was read from
    the Hub, percent, with the conditions in its notes. Benchmarks from a local file or a generator have no such entry.
    """
    files = {}
    for name, entry in results["benchmarks"].items():
        source = entry["source"]
        if "hub_id" not in source or "1" not in entry["pass_at_k"]:
            continue
        cell = entry["pass_at_k"]["1"]
        result = EvalResultEntry(
            dataset_id=source["hub_id"],
            task_id=source.get("config") or "default",
            dataset_revision=source.get("revision"),
            value=round(100 * cell["value"], 2),
            date=results["created"],
            notes=(
                f"pass@1 in percent, mean of n={results['n']} samples, 95 % interval over problems "
                f"[{100 * cell['lower']:.2f}, {100 * cell['upper']:.2f}]; {_sampling_text(results)}; "
                f"prompt digest {results['prompt_digest']}; verifier {_verifier_text(results)}; "
                f"pacs_trl {results['versions'].get('pacs_trl', version('pacs_trl'))}"
            ),
        )
        text = yaml.safe_dump(eval_result_entries_to_yaml([result]), sort_keys=False, allow_unicode=True)
        files[f"{EVAL_RESULTS_FOLDER}/{name}.yaml"] = text
    return files


def _result_facts(results: dict[str, Any]) -> dict[str, Any]:
    shown = []
    for name, entry in results["benchmarks"].items():
        header, lines = tables.table_cells(tables.pass_at_k_rows([results], name))
        values = [line[3:] for line in lines]  # without method, n and runs
        shown.append(
            {
                "title": one_line(entry["title"]),
                "num_problems": entry["source"]["num_problems"],
                "n": results["n"],
                "dataset": entry["source"].get("hub_id"),
                "markdown": tables.to_markdown(header[3:], values),
            }
        )
    prompt = results["protocol"]["prompt"]
    example = f"<problem> {prompt['instruction']}" if prompt["instruction"] else "<problem>"
    longest = max((len(ticks) for ticks in re.findall("`+", example)), default=0)
    return {
        "tables": shown,
        "prompt_example": example,
        "fence": "`" * max(3, longest + 1),  # a prompt may hold a fence of its own
        "sampling": _sampling_text(results),
        "prompt_digest": results["prompt_digest"],
        "verifier": _verifier_text(results),
        "engine": results["engine"]["name"],
        "created": results["created"],
        "commit": results["commit"],
        "hardware": _hardware_text(results["hardware"]),
        "versions": _versions_text(results["versions"]),
    }


def _training_facts(training: dict[str, Any]) -> dict[str, Any]:
    texts = {"hardware": _hardware_text(training["hardware"]), "versions": _versions_text(training["versions"])}
    return training | texts


def _hardware_text(hardware: dict[str, Any]) -> str:
    gpus = hardware["gpus"]
    return f"{len(gpus)} x {gpus[0]}" if gpus else f"{hardware['cpu_cores']} {hardware['machine']} cores"


def _versions_text(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def _sampling_text(results: dict[str, Any]) -> str:
    sampling = results["protocol"]["sampling"]
    return (
        f"temperature {sampling['temperature']}, top-p {sampling['top_p']}, top-k {sampling['top_k']}, at most "
        f"{sampling['max_new_tokens']} tokens"
    )


def _verifier_text(results: dict[str, Any]) -> str:
    verifier = results["protocol"]["verifier"]
    return f"{verifier['name']} {verifier['version']} ({verifier['protocol']} protocol)"


def _is_hub_id(name: Any) -> bool:
    """Whether a published setting names a repository; local paths are names without a slash by then."""
    return isinstance(name, str) and bool(_HUB_ID.fullmatch(name)) and not name.startswith((".", "miniature/"))
