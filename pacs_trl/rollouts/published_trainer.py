"""What PACSTrainer and the baselines leave beside every model that they save, and what of it they push.

TRL writes a draft of a card into `output_dir` with every checkpoint, and pushes that whole folder: the token in training_args.bin,
logs and completions with it. Here each saved model gets the card and the records it is made of (`hub/describe.py`), and a push,
which comes at the end, uploads what belongs to a model (`hub/push.py`).
"""

import json
import logging
import re
from concurrent.futures import Future
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset
from huggingface_hub import HfApi
from trl.trainer.utils import get_config_model_id

from ..evaluation.provenance import training_facts
from ..hub.describe import describe
from ..hub.files import LOG_FILE, RECIPE_FILE, TRAINING_FACTS_FILE
from ..hub.push import PushResult, push
from ..hub.readme import HandWritten, kept_readme
from ..redaction import without_secrets
from .resumable_trainer import ResumableTrainer


logger = logging.getLogger(__name__)

NUM_LOOKED_AT = 64  # prompts, of which the shortest is the card's example


class PublishedTrainer(ResumableTrainer):
    """[`~trl.GRPOTrainer`] whose models come with their card. `recipe` holds the settings of the run, if one describes it."""

    recipe: dict[str, Any] | None = None

    def __init__(self, model, reward_funcs=None, args=None, **kwargs):
        kept_readme(Path(args.output_dir))  # refused now, not after training
        if args.push_to_hub and args.hub_strategy not in ("end", "every_save"):
            raise ValueError(
                f"hub_strategy={args.hub_strategy.value!r} is not supported: checkpoints hold the token (training_args.bin) and "
                "the state of the optimizer. The model is pushed once, by `save_model` or `push_to_hub`: remove the setting."
            )
        self._said: dict[str, Any] = {}  # to `create_model_card`
        self._is_saved = False  # in `output_dir`
        super().__init__(model, reward_funcs, args=args, **kwargs)

    def save_model(self, output_dir=None, _internal_call=False):
        directory = Path(output_dir or self.args.output_dir)
        kept = kept_readme(directory) if self.args.should_save else None  # PEFT writes a draft of its own over it
        super().save_model(str(directory), _internal_call)
        is_final = directory == Path(self.args.output_dir)
        self._is_saved |= is_final
        if kept is not None:
            if is_final or not _internal_call:  # into a checkpoint Trainer writes it last
                self.state.save_to_json(str(directory / LOG_FILE))
            self._describe(directory, kept)
        if self.args.push_to_hub and not _internal_call:
            self.upload(directory, "Model save")

    def _push_from_checkpoint(self, checkpoint_folder):
        """Nothing is pushed before the end."""

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """
        Write the card of the model in `output_dir` anew; before there is one, keep what is said for its card.

        Args:
            model_name (`str`, *optional*):
                Title, if the model has no repository.
            dataset_name (`str`, *optional*):
                What the data set is called on the Hub, in place of what recipe or data say.
            tags (`str` or `list[str]`, *optional*):
                Further tags of the model page.
        """
        given = {"model_name": model_name, "dataset_name": dataset_name}
        given["tags"] = [tags] if isinstance(tags, str) else tags
        self._said |= {key: value for key, value in given.items() if value is not None}
        if self._is_saved and self.args.should_save:  # TRL calls this before every checkpoint, too
            directory = Path(self.args.output_dir)
            self._describe(directory, kept_readme(directory))

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs,
    ) -> "PushResult | Future[PushResult] | None":
        """
        Save the model to `output_dir` and upload it to `hub_model_id`: what belongs to a model, with card, log and recipe.

        Args:
            commit_message, token, revision (`str`, *optional*):
                As in [`~transformers.Trainer.push_to_hub`].
            blocking (`bool`, *optional*, defaults to `True`):
                Whether to wait for the upload.
            private (`bool`, *optional*):
                Whether the repository is made private, if it is made; by default as `hub_private_repo` says.
            kwargs:
                Arguments of [`create_model_card`].

        Returns:
            [`PushResult`], or a future of it if `blocking` is false; `None` on every process but the first.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        if private is not None:
            self.args.hub_private_repo = private
        if kwargs:
            self.create_model_card(**kwargs)
        return self.upload(Path(self.args.output_dir), commit_message, blocking, token, revision)

    def upload(self, directory, commit_message=None, blocking=True, token=None, revision=None):
        """What [`push_to_hub`] does once the model is saved in a directory."""
        if not self.is_world_process_zero():
            return None
        token = token or self.args.hub_token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        call = partial(
            push,
            Path(directory),
            self.hub_model_id,
            private=bool(self.args.hub_private_repo),
            revision=revision or self.args.hub_revision,
            commit_message=commit_message,
            api=(api := HfApi(token=token)),
        )
        return call() if blocking else api.run_as_future(call)

    # Records ------------------------------------------------------------------------------------------------------

    def _describe(self, directory: Path, kept: HandWritten) -> None:
        facts = training_facts(self.accelerator.num_processes) | {"paper": self._paper, "example": self._example}
        facts["distributed"] = self.accelerator.distributed_type.value
        facts["tags"] = sorted({*(self.model.model_tags or ()), *self._said.get("tags", ())})
        if "dataset_name" in self._said:
            facts["dataset_name"] = self._said["dataset_name"]
        if self.recipe is None:
            facts["settings"] = without_secrets(self._settings())
        else:
            recipe = yaml.safe_dump(without_secrets(self.recipe), allow_unicode=True)
            (directory / RECIPE_FILE).write_text(recipe, encoding="utf-8")
        content = json.dumps(facts, indent=1, default=str) + "\n"
        (directory / TRAINING_FACTS_FILE).write_text(content, encoding="utf-8")
        name = self.hub_model_id or self.args.hub_model_id or self._said.get("model_name")
        try:
            describe(directory, name or Path(self.args.output_dir).resolve().name, kept)
        except ValueError as error:  # a file of somebody else: the model is worth more than its card
            logger.warning("The model is saved in %s, but has no card. %s", directory, error)

    @cached_property
    def _example(self) -> dict[str, Any]:
        """A prompt of the training data, and how it was completed."""
        data = self.train_dataset
        if isinstance(data, Dataset):
            prompts = data.select(range(min(len(data), NUM_LOOKED_AT)))["prompt"]
        else:
            prompts = [next(iter(data))["prompt"]]
        return {
            "prompt": min(prompts, key=lambda prompt: len(str(prompt))),
            "max_new_tokens": self.args.max_completion_length,
            "chat_template_kwargs": self.args.chat_template_kwargs,
        }

    def _settings(self) -> dict[str, Any]:
        """What a recipe would say of a run that was started from Python."""
        model = get_config_model_id(self.model.config)
        sources = self.train_dataset.info.download_checksums or {}
        loaded = (re.match(r"hf://datasets/([^@]+)@", source) for source in sources)
        settings = {
            "method": self._name.lower(),
            "model_name_or_path": str(Path(model).resolve()) if model and Path(model).is_dir() else model or None,
            "dataset_name": next((match[1] for match in loaded if match), None),
            "reward_funcs": self.reward_func_names,
        }
        if self.tools:
            settings["tools"] = [tool.__name__ for tool in self.tools]
        for field in fields(self.args):
            value = _plain(getattr(self.args, field.name))
            default = field.default if field.default_factory is MISSING else field.default_factory()
            # transformers replaces some empty defaults with an empty value of another type
            if field.init and value != default and (value not in ("", [], {}) or default):
                settings[field.name] = value
        return settings


def _plain(value: Any) -> Any:
    """A setting as a recipe spells it: an enumeration by its value, a configuration object by its changed fields."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return {f.name: _plain(v) for f in fields(value) if (v := getattr(value, f.name)) != f.default}
    return value
