"""Cards and records beside every saved model, and a push that uploads nothing but a model.

TRL writes a draft of a card with every checkpoint and pushes the whole output folder, with the token in
training_args.bin, logs and completions. Here a push comes at the end, through [`~hub.push`].
"""

import json
from concurrent.futures import Future
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi
from trl.trainer.utils import get_config_model_id

from ..evaluation.provenance import training_facts
from ..hub import LOG_FILE, README_FILE, RECIPE_FILE, TRAINING_FACTS_FILE, PushResult, kept_readme, push, write_card
from ..redaction import without_secrets
from .resumable_trainer import ResumableTrainer


class PublishedTrainer(ResumableTrainer):
    """[`~trl.GRPOTrainer`] whose models come with their card. `recipe` holds the settings of a run from a recipe."""

    recipe: dict[str, Any] | None = None

    def _prepare_loading(self, model, args, arguments) -> None:
        """Check what can be checked before the model is loaded."""
        if args.push_to_hub and args.hub_strategy not in ("end", "every_save"):
            raise ValueError(
                f"hub_strategy={args.hub_strategy.value!r} is not supported: checkpoints hold the token "
                "(training_args.bin) and the state of the optimizer. Remove the setting."
            )
        self._card_facts: dict[str, Any] = {}  # given to `create_model_card`
        self._is_saved = False  # in `output_dir`

    def save_model(self, output_dir=None, _internal_call=False):
        directory = Path(output_dir or self.args.output_dir)
        kept = kept_readme(directory)
        super().save_model(str(directory), _internal_call)
        is_final = directory == Path(self.args.output_dir)
        self._is_saved |= is_final
        if self.args.should_save:
            if kept is not None:
                (directory / README_FILE).write_bytes(kept)
            else:  # PEFT has written a draft, or has changed our card
                (directory / README_FILE).unlink(missing_ok=True)
            if is_final or not _internal_call:  # into a checkpoint Trainer writes it last
                self.state.save_to_json(str(directory / LOG_FILE))
            self._describe(directory)
        if self.args.push_to_hub and not _internal_call:
            self.upload(directory, "Model save")

    def _push_from_checkpoint(self, checkpoint_folder):
        """Nothing is pushed before the end."""

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the card in `output_dir` again; before a model is saved there, keep these facts for its card."""
        given = {"model_name": model_name, "dataset_name": dataset_name}
        given["tags"] = [tags] if isinstance(tags, str) else tags
        self._card_facts |= {key: value for key, value in given.items() if value is not None}
        if self._is_saved and self.args.should_save:  # TRL calls this before every checkpoint, too
            self._describe(Path(self.args.output_dir))

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
        Save the model to `output_dir` and upload to `hub_model_id` what belongs to a model, with card, log and recipe.

        Arguments are those of [`~transformers.Trainer.push_to_hub`], and in `kwargs` those of [`create_model_card`].

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

    def upload(self, directory, commit_message="End of training", blocking=True, token=None, revision=None):
        """Push a directory in which the model is saved."""
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

    def _describe(self, directory: Path) -> None:
        """Write provenance, recipe, and card beside a saved model."""
        facts = training_facts(self.accelerator.num_processes) | {"paper": self._paper}
        tags = sorted({*(self.model.model_tags or ()), *self._card_facts.get("tags", ())})
        facts |= self._card_facts | {"tags": tags}
        if self.recipe is None:
            facts["settings"] = without_secrets(self._settings())
        else:
            recipe = yaml.safe_dump(without_secrets(self.recipe), allow_unicode=True)
            (directory / RECIPE_FILE).write_text(recipe, encoding="utf-8")
        content = json.dumps(facts, indent=1, default=str) + "\n"
        (directory / TRAINING_FACTS_FILE).write_text(content, encoding="utf-8")
        name = self.hub_model_id or self.args.hub_model_id or self._card_facts.get("model_name")
        write_card(directory, name or Path(self.args.output_dir).resolve().name, self.recipe, json.loads(content))

    def _settings(self) -> dict[str, Any]:
        """Settings of a run that was started from Python, as a recipe would name them."""
        model = get_config_model_id(self.model.config)
        settings = {
            "method": self._name.lower(),
            "model_name_or_path": str(Path(model).resolve()) if model and Path(model).is_dir() else model or None,
            "reward_funcs": self.reward_func_names,
            "tools": [tool.__name__ for tool in self.tools or []],
        }
        defaults = {field.name: field.default for field in fields(self.args) if field.init}
        given = self.args.to_dict().items()
        return settings | {
            name: value for name, value in given if name in defaults and value not in (None, "", [], defaults[name])
        }
