"""GenAC ([arXiv 2604.10701](https://huggingface.co/papers/2604.10701)): PPO with a critic that reasons before
stating a value.

The critic is a causal language model. Before each segment of a completion it is prompted for the chance that the
completion will be correct (`_critic.py`), and its answer ends with an integer. REINFORCE trains it towards the
outcome. Everything else is PPO's (`baselines/ppo_trainer.py`). No official code exists. With vLLM one engine serves
both models in turn. See docs/related_methods.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import AutoTokenizer, PreTrainedModel
from trl.models.utils import unwrap_model_for_generation
from trl.trainer.utils import add_fused_lm_head, get_config_model_id

from ..baselines.ppo_config import ActorCriticConfig
from ..baselines.ppo_trainer import ActorCriticTrainer, critic_path, load_critic, padded
from ..evaluation.requests import SamplingSettings
from ..rollouts.engine import ServerFailure, stop_without_engine
from ..rollouts.request_seeds import request_seed
from ..rollouts.timing import PARTS
from ..settings.checks import ignored_settings
from ..settings.fields import setting
from ..update.rollout import without_padding
from ..update.step_sizes import Step
from . import _critic
from ._critic import State


_SUCCESS_RATE_DECAY = 0.9
_FILLER = {"prompt": [0], "ids": [0, 0], "logps": [0.0, 0.0], "weight": 0.0}  # an answer without a gradient
_RATIO_CAP = 2.0  # of the weight between the current critic and the one that generated an answer


@dataclass
class GenACConfig(ActorCriticConfig):
    """
    Configuration of [`GenACTrainer`]: every parameter of [`ActorCriticConfig`], and those of a generative critic.
    Defaults are the paper's if it states them.
    """

    rewards_are_labels = True

    # Parameters that control the critic
    critic_learning_rate: float = setting(1e-6, "Learning rate of the critic.", above=0)
    critic_prompt: str = setting(
        "genac",
        "Prompt of the critic: `genac`, `genac_unconditioned` (without the policy's name, success rate, and "
        "progress), or the path of a `.txt` file with the same placeholders.",
    )
    critic_max_new_tokens: int = setting(1024, "Maximum number of tokens of an answer.", least=1)
    critic_batch_size: int | None = setting(
        None,
        "Answers per forward pass, and per call of `generate` without vLLM. Defaults to "
        "`per_device_train_batch_size`.",
        least=1,
    )

    # Parameters that control segments and values
    segment_probability: float | None = setting(
        0.2,
        "Tokens with a lower probability under the policy end a segment. `None` disables the rule.",
        above=0,
        most=1,
    )
    segment_length: int | None = setting(
        512, "Every `segment_length`-th token ends a segment. `None` disables the rule.", least=1
    )
    max_segments: int = setting(
        16,
        "Maximum number of segments of a completion, evenly spaced. The critic answers once per segment, "
        "and in training also for the state before the last token, from which it only learns.",
        least=1,
    )

    # Parameters that control training
    critic_pretraining_steps: int = setting(100, "Optimizer steps at the start that train only the critic.", least=0)

    @property
    def critic_alone_steps(self) -> int:
        return self.critic_pretraining_steps

    def errors(self, step: Step) -> list[str]:
        errors = super().errors(step)
        errors += ignored_settings(self, ["vllm_sync_adapter"], "the critic's weights are sent to vLLM, too")
        if not _critic.template_path(self.critic_prompt).is_file():
            names = ", ".join(sorted(path.stem for path in _critic.TEMPLATES.iterdir()))
            errors.append(
                f"critic_prompt={self.critic_prompt!r} is no template and no file in the working directory. Set it to "
                f"one of {names}, or to the path of a .txt file."
            )
        if self.max_completion_length is None:
            errors.append(
                "max_completion_length=None is not supported by GenAC: the critic's context must hold the longest "
                "response. Set a number."
            )
        return errors


class GenACTrainer(ActorCriticTrainer):
    """
    Trainer for Generative Actor-Critic, with the arguments of [`~trl.GRPOTrainer`] and rewards in [0, 1]. `args` is a
    [`GenACConfig`]. Logs the metrics of [`~trl.GRPOTrainer`] and `genac/*`.
    """

    args: GenACConfig
    _saved_attributes = (*ActorCriticTrainer._saved_attributes, "_success_rate", "_num_answers")
    _tag_names = ["trl", "genac"]
    _name = "GenAC"
    _config_class = GenACConfig
    _paper = {
        "title": "Bringing Value Models Back: Generative Critics for Value Modeling in LLM Reinforcement Learning",
        "id": "2604.10701",
    }

    def _create_critic(self, policy: str | PreTrainedModel, args: GenACConfig, arguments: dict[str, Any]):
        self._prompt = _critic.CriticPrompt(args.critic_prompt)
        path, tokenizer = critic_path(policy, args), arguments["processing_class"]
        if tokenizer is None or args.critic_model_name_or_path is not None:
            trust = {"trust_remote_code": args.trust_remote_code}
            tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", **trust)
        self._critic_tokenizer, dataset = tokenizer, arguments["train_dataset"]
        prompts = dataset["prompt"] if hasattr(dataset, "__len__") else []
        _critic.check_critic(policy, path, args, tokenizer, self._prompt, prompts)
        critic = load_critic(policy, args)
        add_fused_lm_head(critic, outputs=("log_probs",))
        return critic

    def _prepare_learning(self) -> None:
        super()._prepare_learning()
        args = self.args
        self._batch_size = args.critic_batch_size or args.per_device_train_batch_size
        self.timer.parts = ("critic", *PARTS)
        size = sum(parameter.numel() for parameter in self.model.parameters())
        size_text = f"{size / 1e9:.1f}B" if size >= 1e8 else f"{size / 1e6:.1f}M"
        self._actor_name = f"{get_config_model_id(self.model.config).rsplit('/')[-1]}, {size_text} parameters"

    def _value_tokens(self, inputs, batch):
        mask = self._value_mask(batch)
        owns = [row.nonzero()[:, 0].tolist() for row in mask.cpu()]  # tokens of the policy, by position
        starts = self._segments(batch, owns)
        questions = self._questions(inputs, batch, owns, starts)
        answers = self._generate_answers(questions)
        parsed = [self._prompt.parse(self._critic_tokenizer.decode(ids)) for _, ids, _ in answers]
        values = torch.tensor([math.nan if value is None else value for value in parsed])

        of_segments: list[list[float]] = [[] for _ in owns]
        for each, value in zip(questions, parsed, strict=True):
            if each.segment is not None:
                of_segments[each.row].append(value or 0.0)
        of_completions = torch.zeros(mask.shape, device=mask.device)
        lambdas = torch.ones(mask.shape, device=mask.device)
        for i, own in enumerate(owns):
            if own:
                of_completions[i, own] = _critic.values_of_tokens(of_segments[i], starts[i], len(own)).to(mask.device)
                lambdas[i, own] = _critic.border_lambdas(starts[i], len(own), self.args.gae_lambda).to(mask.device)
        self._log_answers(questions, values, answers)
        if self.model.training:
            self._store_answers(batch, questions, answers, values)
            rate = self._labels.nanmean().item()
            if rate == rate:
                decay = _SUCCESS_RATE_DECAY if self._success_rate is not None else 0.0
                self._success_rate = decay * (self._success_rate or 0.0) + (1 - decay) * rate
        return of_completions, lambdas

    @torch.no_grad()
    def _segments(self, batch: dict, owns: list[list[int]]) -> list[list[int]]:
        """Return the first token of each segment of each completion, counted over the tokens of the policy."""
        args, length = self.args, batch["completion_ids"].size(1)
        probabilities = torch.ones(batch["completion_ids"].shape)
        if args.segment_probability is not None:
            logps = batch.get("sampling_per_token_logps", batch.get("old_per_token_logps"))
            if logps is None:
                parts = ("prompt", "completion")
                ids = (without_padding(batch[f"{part}_ids"], batch[f"{part}_mask"]) for part in parts)
                logps = padded(self.compute_logps(*ids), length)
            probabilities = logps.exp().nan_to_num(1.0).cpu()
        rules = {"threshold": args.segment_probability, "length": args.segment_length, "most": args.max_segments}
        return [_critic.segment_starts(probabilities[i, own].tolist(), **rules) for i, own in enumerate(owns)]

    def _questions(self, inputs, batch: dict, owns: list[list[int]], starts: list[list[int]]) -> list[State]:
        """Return a question per segment, and in training one for the state before the last token."""
        training = self.model.training
        n = self.num_generations if training else self.num_generations_eval
        means = self._labels.view(-1, n).nanmean(dim=1).repeat_interleave(n)  # of the prompts, on all processes
        labels, pooled = batch["labels"].tolist(), means[self.accelerator.process_index * len(inputs) :].tolist()
        completions = without_padding(batch["completion_ids"], batch["completion_mask"])
        questions = []
        for i, own in enumerate(owns):
            problem = _critic.problem_of(inputs[i]["prompt"])
            segments: list[tuple[int | None, int]] = list(enumerate(starts[i]))
            if training and own and starts[i][-1] != len(own) - 1:
                segments.append((None, len(own) - 1))
            for segment, start in segments:
                prefix = completions[i][: own[start]]
                text = self._tokenizer.decode(prefix, skip_special_tokens=True)
                # before the first token the mean reward of the prompt
                outcome = pooled[i] if training and start == 0 else labels[i]
                questions.append(State(problem, text, len(prefix), i, segment, outcome))
        return questions

    def _generate_answers(self, states: Sequence[State]) -> list[tuple[list[int], list[int], list[float]]]:
        """Return the token ids of prompt and answer for each state, and the log-probs of the answer."""
        actor = _critic.Actor(self._actor_name, self.max_completion_length, self._success_rate)
        texts = [self._prompt.render(state, actor) for state in states]
        prompts = _critic.question_ids(self._critic_tokenizer, texts, self.chat_template_kwargs)
        # Processes generate together, so each needs equally many prompts; padding samples are discarded.
        counts = gather_object([len(prompts)])
        if max(counts) == 0:  # no completion has a verdict
            return []
        padded = prompts + [[self._critic_tokenizer.eos_token_id]] * (max(counts) - len(prompts))
        first = self._num_answers + sum(counts[: self.accelerator.process_index])
        self._num_answers += sum(counts) * self.model.training
        seeds = [request_seed(f"{self.args.seed}/critic", first + i) for i in range(len(padded))]
        try:
            with self.timer.part("critic"):
                answers = self._use_engine(padded) if self.use_vllm else self._use_model(padded, seeds)
        except ServerFailure as failure:
            stop_without_engine(self, failure)
        return [(prompt, *answer) for prompt, answer in zip(prompts, answers, strict=False)]

    def _use_model(self, prompts: list[list[int]], seeds: list[int]) -> list[tuple[list[int], list[float]]]:
        temperature, most = 1.0 if self.model.training else 0.0, self.args.critic_max_new_tokens
        settings = SamplingSettings(temperature=temperature, top_p=1.0, max_new_tokens=most)
        checkpointing = {"gradient_checkpointing_kwargs": self.args.gradient_checkpointing_kwargs}
        options = {"tag": self._prompt.tags[1], "batch_size": self._batch_size, "synced": self.is_fsdp_enabled}
        with (
            unwrap_model_for_generation(self.critic, self.accelerator, **checkpointing) as critic,
            self._dist.summon_full_params(self.critic, recurse=False),
        ):
            return _critic.generate_answers(critic, self._critic_tokenizer, prompts, seeds, settings, **options)

    def _use_engine(self, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        sampling = {
            "temperature": 1.0 if self.model.training else 0.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": None,
            "repetition_penalty": 1.0,
            "max_completion_length": self.args.critic_max_new_tokens,
            "structured_outputs_regex": None,
            "generation_kwargs": {"stop": [self._prompt.tags[1]], "include_stop_str_in_output": True},
        }
        engine, self._last_loaded_step = self.vllm_generation, -1  # sends the policy's weights again
        with engine.using_weights_of(self.accelerator.unwrap_model(self.critic), **sampling):
            _, ids, logps, _ = engine.generate(prompts=prompts, images=None, num_generations=1)
        end = self._critic_tokenizer.eos_token_id
        known = [[math.nan if one[0] is None else one[0] for one in row] for row in logps]
        return [(list(own), row) if own else ([end], [math.nan]) for own, row in zip(ids, known, strict=True)]

    def _log_answers(self, questions: list[State], values: torch.Tensor, answers) -> None:
        """Log metrics over the answers of all processes."""
        pairs = zip(questions, values.tolist(), answers, strict=True)
        known = gather_object([(v, e.outcome, e.segment is not None, len(ids)) for e, v, (_, ids, _) in pairs])
        num_completions = sum(gather_object([len({each.row for each in questions})]))
        found, outcomes = (torch.tensor([each[i] for each in known]) for i in range(2))
        self._log_values(
            critic_reward=_critic.critic_rewards(found, outcomes).double().mean().item(),
            brier=(outcomes - found.double().nan_to_num(0.0)).square().mean().item(),
            unparsed=found.isnan().double().mean().item(),
            segments=sum(each[2] for each in known) / max(num_completions, 1),
            answer_length=sum(each[3] for each in known) / max(len(known), 1),
            success_rate=math.nan if self._success_rate is None else self._success_rate,
        )

    def _store_answers(self, batch: dict, questions: list[State], answers, values: torch.Tensor) -> None:
        """Store the answers with their completions, so that both are shuffled and saved together."""
        outcomes, device = torch.tensor([each.outcome for each in questions]), self.accelerator.device
        rewards = _critic.critic_rewards(values, outcomes).to(device)
        weights = _critic.reinforce_weights(rewards, outcomes.to(device), self._sum).tolist()
        batch["answers"] = [[] for _ in batch["labels"]]
        for each, (prompt, ids, logps), weight in zip(questions, answers, weights, strict=True):
            batch["answers"][each.row].append({"prompt": prompt, "ids": ids, "logps": logps, "weight": weight})
        batch["answer_tokens"] = self._sum(torch.tensor(sum(len(ids) for _, ids, _ in answers), device=device))

    def _train_critic(self, inputs: dict) -> None:
        answers, size = [answer for row in inputs["answers"] for answer in row], self._batch_size
        denominator = self._share_of_generation(inputs["answer_tokens"])
        total = torch.zeros((), device=self.accelerator.device)
        # Processes need equally many batches.
        number = max(1, *gather_object([-(-len(answers) // size)]))
        with self._critic_pass.attention():
            for i in range(number):
                with self._accumulating_critic(i == number - 1):
                    losses = self._answer_losses(answers[i * size : (i + 1) * size] or [_FILLER])
                    self.accelerator.backward(losses.sum() / denominator)
                total += losses.detach().sum() / denominator
        self._critic_loss = self._critic_loss + total
        if self.accelerator.sync_gradients:
            loss = self._sum(self._critic_loss).item() / self.accelerator.num_processes
            self._critic_loss = torch.zeros_like(total)
            self._log_values(critic_loss=loss, critic_grad_norm=self._step_critic())

    def _answer_losses(self, answers: list[dict]) -> torch.Tensor:
        """Return the losses of the tokens of some answers, concatenated."""
        scores = self._critic_pass.compute_logps(
            self.critic, *([a[name] for a in answers] for name in ("prompt", "ids"))
        )
        logps = torch.cat(scores.logps)
        old_logps = torch.tensor([x for answer in answers for x in answer["logps"]], device=logps.device)
        weights = torch.tensor([a["weight"] for a in answers for _ in a["ids"]], device=logps.device)
        return _critic.reinforce_losses(logps, old_logps, weights, _RATIO_CAP)

    def _reset_run(self) -> None:
        super()._reset_run()
        self._success_rate: float | None = None  # smoothed; part of the critic's prompt
        self._num_answers = 0  # of all processes; seeds without vLLM
        self._critic_loss = torch.zeros((), device=self.accelerator.device)
