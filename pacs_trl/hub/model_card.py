"""A model card from what is known of a model, and its numbers as metadata that the Hub can read.

For people the card says where the model comes from, how to use it, how good it is and how it was trained; `model-index` and one
`.eval_results/*.yaml` per Hub benchmark repeat the numbers for the Hub. What cannot be shown to be on the Hub is named and not linked.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub.constants
import jinja2
import yaml
from huggingface_hub import (
    EvalResult,
    EvalResultEntry,
    ModelCard,
    ModelCardData,
    eval_result_entries_to_yaml,
    get_session,
)
from huggingface_hub.utils import build_hf_headers, httpx

from ..data import TRAINING_SETS
from ..data.sets import FILE_FORMATS, MINIATURE
from ..redaction import published
from ..report import tables
from ..report.tables import one_line
from .files import EVAL_RESULTS_FOLDER, TRAINING_FIGURE


TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"
HUB = "https://huggingface.co"
UNKNOWN_LICENSE = "unknown"  # the Hub's word for it

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What a run reads; where it lies on this machine, others do not have it.
_READ = (
    *("model_name_or_path", "critic_model_name_or_path", "critic_prompt", "critic_sft_dataset"),
    *("dataset_name", "dataset_path", "chat_template_path"),
)
# What a list of settings leaves out: they say where a run was, or stand elsewhere on the card.
_NOT_SHOWN = re.compile(
    r"method|model_name_or_path|dataset_name|disable_tqdm|report_to|run_name|hub_|push_|output_dir|log"
)


class CardInputs(NamedTuple):
    """
    What a card is written from; everything may be missing.

    - `results`: a parsed results.json.
    - `recipe`: the settings of the training run; what must not be shown is left out here.
    - `training`: a parsed provenance.json: commit, versions and hardware of the training run, and, from our trainers, a prompt
      of its data, the paper of the method, and the settings of a run without a recipe.
    - `is_adapter`: whether the weights are an adapter, which needs its base model.
    - `has_training_figure`: whether `training.png` lies beside the card.
    """

    results: dict[str, Any] | None = None
    recipe: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    is_adapter: bool = False
    has_training_figure: bool = False


def build_card(name: str, inputs: CardInputs) -> ModelCard:
    """
    The model card of one checkpoint.

    Args:
        name (`str`): `USER/NAME` on the Hub, or a name. The last part is the title and the name in `model-index`.
        inputs ([`CardInputs`]): What is known about the model.

    Returns:
        [`~huggingface_hub.ModelCard`], ready to `save`.
    """
    results = inputs.results
    training = published(inputs.training or {})
    given = inputs.recipe or (inputs.training or {}).get("settings", {})
    settings = published(given)
    settings |= {key: training[key] for key in ("dataset_name",) if key in training}  # as `create_model_card` was told
    title = one_line(name.split("/")[-1])
    start = settings.get("model_name_or_path")
    base_model = start if is_hub_id(start) else None
    dataset = _hub_dataset(settings)
    method = one_line(str(settings.get("method", "pacs")))
    paper = training.get("paper", {})
    papers = {f"arxiv:{paper['id']}"} if "id" in paper else set()
    data = ModelCardData(
        model_name=title,
        base_model=base_model,
        datasets=[dataset] if dataset else None,
        library_name="peft" if inputs.is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=sorted({"trl", method.lower(), *papers, *training.get("tags", ())}),
        eval_results=model_index(results) if results else None,
        **license_of(str(given.get("model_name_or_path") or "")),
    )
    content = _template().render(
        data.to_dict(),
        card_data=data.to_yaml(),
        model_name=title,
        origin=_origin(settings, inputs.is_adapter),
        local_base=_code(start) if inputs.is_adapter and start and not base_model else None,
        method="GenAC" if method == "genac" else method.upper(),
        paper=paper,
        dataset=_dataset_text(settings, dataset),
        snippet=_snippet(name if "/" in name else ".", training["example"]) if training.get("example") else None,
        tools=", ".join(_code(str(name)) for name in settings.get("tools") or []),
        command=_command(inputs.recipe, inputs.training) if inputs.recipe is not None else None,
        missing=_missing(inputs.recipe or {}, training.get("distributed")),
        settings=_settings_text(settings) if inputs.recipe is None else None,
        training=_training_facts(training) if training else None,
        license=data.license,
        training_figure=TRAINING_FIGURE if inputs.has_training_figure else None,
        **(_result_facts(results) if results else {"tables": None}),
    )
    return ModelCard(content)


@lru_cache
def _template() -> jinja2.Template:
    """Compiled once, as `ModelCard.from_template` does for each card: every checkpoint has one."""
    return jinja2.Template(TEMPLATE.read_text(encoding="utf-8"))


# Where it comes from -----------------------------------------------------------------------------------------------


def is_hub_id(name: Any) -> bool:
    """Whether a published setting names a repository; local paths are names without a slash by then, or end as files do."""
    is_name = isinstance(name, str) and bool(_HUB_ID.fullmatch(name))
    return is_name and not name.startswith(MINIATURE) and Path(name).suffix not in FILE_FORMATS


@lru_cache
def license_of(model: str) -> dict[str, str]:
    """
    The licence of the model that was trained, as its own card states it: keys of a card's metadata.

    `"unknown"` if it states none or cannot be reached. A miniature is made by this package, and of nothing else.
    """
    if model.startswith(MINIATURE):
        return {"license": "apache-2.0"}
    if not is_hub_id(model) and not Path(model).is_absolute():
        return {"license": UNKNOWN_LICENSE}
    try:
        if Path(model).is_dir():
            card = ModelCard((Path(model) / "README.md").read_text(encoding="utf-8")).data
        else:  # asked once: huggingface_hub's own way goes on for half a minute where there is no connection
            url = f"{huggingface_hub.constants.ENDPOINT}/{model}/resolve/main/README.md"
            response = get_session().get(url, headers=build_hf_headers(), follow_redirects=True, timeout=5)
            card = ModelCard(response.raise_for_status().text).data
    except (OSError, ValueError, yaml.YAMLError, httpx.HTTPError):
        return {"license": UNKNOWN_LICENSE}
    keys = ("license", "license_name", "license_link")
    stated = {key: card.get(key) for key in keys if isinstance(card.get(key), str)}
    if "://" not in stated.get("license_link", "://"):
        file = stated.pop("license_link")
        stated |= {"license_link": f"{HUB}/{model}/blob/main/{file}"} if is_hub_id(model) else {}
    return {"license": UNKNOWN_LICENSE} | stated


def _origin(settings: Mapping[str, Any], is_adapter: bool) -> str:
    if "model_name_or_path" not in settings:
        model = "a language model"
    else:
        name = str(settings["model_name_or_path"] or "")
        if not name:
            model = "a model made from scratch"
        elif name.startswith(MINIATURE):
            model = f"a miniature model made from scratch ({_code(name)})"
        else:
            model = f"[{name}]({HUB}/{name})" if is_hub_id(name) else f"the model {_code(name)}"
    text = f"an adapter of {model}" if is_adapter else model
    return text[0].upper() + text[1:]


def _hub_dataset(settings: Mapping[str, Any]) -> str | None:
    name = settings.get("dataset_name")
    if isinstance(name, str) and name in TRAINING_SETS:
        return TRAINING_SETS[name].hub_id
    return name if is_hub_id(name) else None


def _dataset_text(settings: Mapping[str, Any], dataset: str | None) -> str | None:
    name = settings.get("dataset_name")
    if name is None:
        return None
    if dataset is not None:
        return f"[{dataset}]({HUB}/datasets/{dataset})"
    return f"{_code(name)} ({'generated problems' if str(name).startswith(MINIATURE) else 'not on the Hub'})"


def _code(text: Any) -> str:
    return f"`{one_line(str(text)).replace('`', chr(39))}`"


# How to use it, and how it was made --------------------------------------------------------------------------------


def _snippet(place: str, example: Mapping[str, Any]) -> str:
    prompt, template = example["prompt"], example.get("chat_template_kwargs")
    kwargs = f", tokenizer_encode_kwargs={template!r}" if template and not isinstance(prompt, str) else ""
    lines = [
        "from transformers import pipeline",
        "",
        f'generator = pipeline("text-generation", model={json.dumps(place)})'
        + ("  # this folder" if place == "." else ""),
        "prompt = " + repr(prompt).replace("<!--", "<\\x21--"),  # no mark of ours, see `readme.py`
        f"output = generator(prompt, max_new_tokens={example['max_new_tokens']}, return_full_text=False{kwargs})",
        'print(output[0]["generated_text"])',
    ]
    return "\n".join(lines)


def _command(recipe: Mapping[str, Any], training: Mapping[str, Any] | None) -> str:
    processes = training["num_processes"] if training else 1
    launcher = (
        "pacs-trl train" if processes == 1 else f"accelerate launch --num_processes {processes} -m pacs_trl.train"
    )
    return f"{launcher} --config recipe.yaml" + (" --push_to_hub false" if recipe.get("push_to_hub") else "")


def _missing(recipe: Mapping[str, Any], distributed: str | None) -> list[str]:
    """What the command needs and a copy of the repository does not hold."""
    shown = published(recipe)
    local = [
        shown[key]
        for key in _READ
        if recipe.get(key) and (shown.get(key) != recipe[key] or Path(str(shown[key])).suffix in FILE_FORMATS)
    ]
    functions = [*(recipe.get("reward_funcs") or []), *(recipe.get("tools") or [])]
    names = [_code(name) for name in [*local, *(f for f in functions if "." in str(f))]]
    return names + [f"`--config_file` of accelerate for {distributed}"] * (distributed in ("FSDP", "DEEPSPEED"))


def _settings_text(settings: Mapping[str, Any]) -> str | None:
    shown = {key: value for key, value in settings.items() if not _NOT_SHOWN.match(key)}
    text = yaml.safe_dump(shown, allow_unicode=True).strip()
    return f"{_fence(text)}yaml\n{text}\n{_fence(text)}" if shown else None


def _fence(text: str) -> str:
    """Marks of a block that no fence in its text ends."""
    return "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))


def _training_facts(training: dict[str, Any]) -> dict[str, Any]:
    texts = {"hardware": _hardware_text(training["hardware"]), "versions": _versions_text(training["versions"])}
    return training | texts


# How good it is ----------------------------------------------------------------------------------------------------


def model_index(results: dict[str, Any]) -> list[EvalResult]:
    """For the smallest and the largest k of every benchmark one entry of `model-index`: percent, with its interval."""
    entries = []
    for name, entry in results["benchmarks"].items():
        ks = sorted(entry["pass_at_k"], key=int)
        for k in dict.fromkeys((ks[0], ks[-1])):
            cell = entry["pass_at_k"][k]
            entries.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=entry["source"].get("hub_id") or name.replace("/", "-"),
                    dataset_name=entry["title"],
                    metric_type=f"pass@{k}",
                    metric_name=f"pass@{k}, 95 % interval {100 * cell['lower']:.1f} to {100 * cell['upper']:.1f}",
                    metric_value=round(100 * cell["value"], 2),
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
                "dataset": entry["source"].get("hub_id"),
                "markdown": tables.to_markdown(header[3:], values),
            }
        )
    prompt = results["protocol"]["prompt"]
    example = f"<problem> {prompt['instruction']}" if prompt["instruction"] else "<problem>"
    return {
        "tables": shown,
        "results": results,
        "prompt_example": example,
        "fence": _fence(example),
        "sampling": _sampling_text(results),
        "verifier": _verifier_text(results),
        "hardware": _hardware_text(results["hardware"]),
        "versions": _versions_text(results["versions"]),
    }


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
