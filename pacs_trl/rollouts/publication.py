"""Saved models with model card, recipe, and provenance, and their upload to the Hub."""

import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from accelerate.utils import save_fsdp_model
from huggingface_hub import HfApi
from transformers.integrations.fsdp import get_fsdp_ckpt_kwargs
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_NAME
from trl.trainer.utils import get_config_model_id

from ..data import TRAINING_SETS, gym
from ..data.columns import is_in_memory
from ..data.images import has_images
from ..evaluation.provenance import training_facts
from ..hub import LOG_FILE, RECIPE_FILE, TRAINING_FACTS_FILE, create_branch, push
from ..model_card import NEUTRAL_PROBLEM, README_FILE, kept_readme, write_card
from ..redaction import without_secrets
from .checkpoint import reporting_full_disk
from .image_checkpoints import copy_processor_files


_PROMPTS_FOR_CARD, _LONGEST_FOR_CARD = 100, 1000  # characters


class Publication:
    """The part of [`RolloutTrainer`] that saves and uploads models; a base class of it before
    [`~trl.GRPOTrainer`]. `recipe` holds the settings of a run that was started from a recipe."""

    recipe: dict[str, Any] | None = None

    def __init_subclass__(cls, **kwargs):
        """Give a class that sets `_name`, and is thus another method than its base class, neither the paper nor the
        tags of that base class."""
        super().__init_subclass__(**kwargs)
        if "_name" in vars(cls):
            if "_paper" not in vars(cls):
                cls._paper = {}
            if "_tag_names" not in vars(cls):
                cls._tag_names = ["trl", cls._name.lower()]

    def save_weights(self, output_dir: str, is_checkpoint: bool) -> None:
        """Save the model and tokenizer without a model card. In checkpoints, Trainer itself saves FSDP shards."""
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        if plugin is not None and "SHARDED" in str(plugin.state_dict_type):
            if self.args.should_save:  # config and tokenizer, which Trainer omits
                self._save(output_dir, state_dict={})
                for name in (SAFE_WEIGHTS_NAME, ADAPTER_SAFE_WEIGHTS_NAME):  # these files would be empty
                    Path(output_dir, name).unlink(missing_ok=True)
            if not is_checkpoint:
                save_fsdp_model(plugin, self.accelerator, self.model, output_dir, **get_fsdp_ckpt_kwargs())
        with reporting_full_disk(self.args.output_dir):
            super().save_model(output_dir, _internal_call=True)

    def save_model(self, output_dir=None, _internal_call=False):
        directory = Path(output_dir or self.args.output_dir)
        is_final = directory == Path(self.args.output_dir)
        readme = kept_readme(directory)  # one that a user has edited
        self.save_weights(str(directory), is_checkpoint=_internal_call and not is_final)
        self._is_saved |= is_final
        if self.args.should_save:
            (directory / README_FILE).unlink(missing_ok=True)  # PEFT's draft
            if readme is not None:
                (directory / README_FILE).write_bytes(readme)
            if is_final or not _internal_call:  # in checkpoints Trainer writes it last
                self.state.save_to_json(str(directory / LOG_FILE))
            copy_processor_files(self._processor_files, directory)
            self._describe_model(directory)
        if self.args.push_to_hub and not _internal_call:
            self.upload(directory, "Model save")

    def _describe_model(self, directory: Path) -> None:
        """Write provenance, recipe, and model card into the directory of a saved model."""
        card_facts = self._card_facts
        tags = sorted({*(self.model.model_tags or ()), *card_facts.get("tags", ())})
        facts = training_facts(self.accelerator.num_processes) | {"method_name": self._name, "paper": self._paper}
        facts |= card_facts | {"tags": tags}
        if (example := self._example()) is not None:
            facts["example"] = example
        if self._has_language_model_inside:
            facts["pipeline_tag"] = "image-text-to-text"
        if self.recipe is None:
            facts["settings"] = without_secrets(self._settings_from_python())
        else:
            recipe = yaml.safe_dump(without_secrets(self.recipe), allow_unicode=True)
            (directory / RECIPE_FILE).write_text(recipe, encoding="utf-8")
        content = json.dumps(facts, indent=1, default=str) + "\n"
        (directory / TRAINING_FACTS_FILE).write_text(content, encoding="utf-8")
        name = self.hub_model_id or self.args.hub_model_id or card_facts.get("model_name")
        write_card(directory, name or Path(self.args.output_dir).resolve().name, self.recipe, json.loads(content))

    def _example(self) -> dict[str, Any] | None:
        """Return the prompt with which the model card shows the use of the model: the shortest of the first training
        prompts if they are public ones of a named set, else a neutral problem in the form of the prompts. `None` if an
        environment generates prompts, they have images, or they are long."""
        dataset = self.train_dataset
        if not is_in_memory(dataset) or self.environment_factories is not None or has_images(dataset):
            return None
        prompts = dataset.select_columns(["prompt"])[:_PROMPTS_FOR_CARD]["prompt"]
        prompt = min(prompts, key=lambda prompt: len(str(prompt)))
        if not _is_public(self.recipe or {}):
            prompt = NEUTRAL_PROBLEM if isinstance(prompt, str) else [{"role": "user", "content": NEUTRAL_PROBLEM}]
        elif isinstance(prompt, list):
            prompt = [{"role": turn["role"], "content": turn.get("content")} for turn in prompt]
        if len(str(prompt)) > _LONGEST_FOR_CARD:
            return None
        return {"prompt": prompt, "max_new_tokens": self.args.max_completion_length or 1024}

    def _settings_from_python(self) -> dict[str, Any]:
        """Return the settings of a run that was started from Python, under the key names of a recipe."""
        model = get_config_model_id(self.model.config) or None
        if model is not None and Path(model).is_dir():
            model = str(Path(model).resolve())
        settings = {
            "method": self._name.lower(),
            "model_name_or_path": model,
            "reward_funcs": self.reward_func_names,
            "tools": [tool.__name__ for tool in self.tools or []],
        }
        defaults = {field.name: field.default for field in fields(self.args) if field.init}
        for name, value in self.args.to_dict().items():
            if name in defaults and value not in (None, "", [], defaults[name]):
                settings[name] = value
        return settings

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the repository and the branch of the upload, so that what is wrong with them ends the run at its
        start."""
        super().init_hf_repo(token=token)
        if self.is_world_process_zero():
            create_branch(HfApi(token=token or self.args.hub_token), self.hub_model_id, self.args.hub_revision)

    def _push_from_checkpoint(self, checkpoint_folder):
        """Do nothing: models are pushed only at the end of training."""

    def create_model_card(self, model_name=None, dataset_name=None, tags=None) -> None:
        """Rewrite the model card in `output_dir` with these facts, or store them until a model is saved there."""
        tags = [tags] if isinstance(tags, str) else tags
        facts = {"model_name": model_name, "dataset_name": dataset_name, "tags": tags}
        self._card_facts |= {name: value for name, value in facts.items() if value is not None}
        if self._is_saved and self.args.should_save:  # TRL calls this before every checkpoint, too
            self._describe_model(Path(self.args.output_dir))

    def push_to_hub(self, commit_message="End of training", blocking=True, token=None, revision=None, **kwargs):
        """Save the model to `output_dir`, and upload the model files, card, log, and recipe to `hub_model_id`.
        Arguments are those of [`~transformers.Trainer.push_to_hub`] and [`create_model_card`]. Returns
        the paths of the files, or a future of them if `blocking` is `False`; `None` on all processes except the main
        process."""
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        self.args.hub_private_repo = kwargs.pop("private", self.args.hub_private_repo)
        if kwargs:
            self.create_model_card(**kwargs)
        return self.upload(Path(self.args.output_dir), commit_message, blocking, token, revision)

    def upload(self, directory: Path, commit_message: str | None, blocking=True, token=None, revision=None):
        """Upload the directory of a saved model; arguments and result are those of [`push_to_hub`]."""
        if not self.is_world_process_zero():
            return None
        token = token or self.args.hub_token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        api, settings = HfApi(token=token), {"private": bool(self.args.hub_private_repo)}
        settings |= {"revision": revision or self.args.hub_revision, "commit_message": commit_message, "api": api}
        call = partial(push, directory, self.hub_model_id, **settings)
        return call() if blocking else api.run_as_future(call)


def _is_public(recipe: dict[str, Any]) -> bool:
    """Return whether a run trains on a set that this package names and that is not read from a local file."""
    return recipe.get("dataset_name") in (*TRAINING_SETS, gym.NAME) and not recipe.get("dataset_path")
