"""Model card, recipe, and provenance of saved models, and their upload to the Hub."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi
from trl.trainer.utils import get_config_model_id

from ..evaluation.provenance import training_facts
from ..hub import README_FILE, RECIPE_FILE, TRAINING_FACTS_FILE, kept_readme, push, write_card
from ..redaction import without_secrets


def describe_model(trainer: Any, directory: Path) -> None:
    """Write provenance, recipe, and model card into the directory of a saved model."""
    given = trainer._card_facts
    tags = sorted({*(trainer.model.model_tags or ()), *given.get("tags", ())})
    facts = training_facts(trainer.accelerator.num_processes) | {"paper": trainer._paper} | given | {"tags": tags}
    if trainer.recipe is None:
        facts["settings"] = without_secrets(_settings_from_python(trainer))
    else:
        recipe = yaml.safe_dump(without_secrets(trainer.recipe), allow_unicode=True)
        (directory / RECIPE_FILE).write_text(recipe, encoding="utf-8")
    content = json.dumps(facts, indent=1, default=str) + "\n"
    (directory / TRAINING_FACTS_FILE).write_text(content, encoding="utf-8")
    name = trainer.hub_model_id or trainer.args.hub_model_id or given.get("model_name")
    write_card(directory, name or Path(trainer.args.output_dir).resolve().name, trainer.recipe, json.loads(content))


def _settings_from_python(trainer: Any) -> dict[str, Any]:
    """Return the settings of a run that was started from Python, under the key names of a recipe."""
    model = get_config_model_id(trainer.model.config)
    settings = {
        "method": trainer._name.lower(),
        "model_name_or_path": str(Path(model).resolve()) if model and Path(model).is_dir() else model or None,
        "reward_funcs": trainer.reward_func_names,
        "tools": [tool.__name__ for tool in trainer.tools or []],
    }
    defaults = {field.name: field.default for field in fields(trainer.args) if field.init}
    given = trainer.args.to_dict().items()
    return settings | {
        name: value for name, value in given if name in defaults and value not in (None, "", [], defaults[name])
    }


@contextmanager
def keeping_readme(directory: Path, is_main_process: bool) -> Iterator[None]:
    """Preserve a README that a user has edited, and delete the draft that PEFT writes when it saves a model."""
    readme = kept_readme(directory)
    yield
    if is_main_process:
        if readme is not None:
            (directory / README_FILE).write_bytes(readme)
        else:
            (directory / README_FILE).unlink(missing_ok=True)


def upload(
    trainer: Any,
    directory: str | Path,
    commit_message: str | None = "End of training",
    blocking: bool = True,
    token: str | None = None,
    revision: str | None = None,
):
    """Upload the directory of a saved model. Returns a [`~hub.PushResult`], or a future of it if `blocking` is
    `False`; `None` on all processes except the main process."""
    if not trainer.is_world_process_zero():
        return None
    token = token or trainer.args.hub_token
    if trainer.hub_model_id is None:
        trainer.init_hf_repo(token=token)
    api = HfApi(token=token)
    call = partial(
        push,
        Path(directory),
        trainer.hub_model_id,
        private=bool(trainer.args.hub_private_repo),
        revision=revision or trainer.args.hub_revision,
        commit_message=commit_message,
        api=api,
    )
    return call() if blocking else api.run_as_future(call)
