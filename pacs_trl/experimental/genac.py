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

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import AutoTokenizer, PreTrainedModel
from trl.models.utils import unwrap_model_for_generation
from trl.trainer.utils import add_fused_lm_head, get_config_model_id

from ..baselines.ppo_config import ActorCriticConfig
from ..baselines.ppo_trainer import ActorCriticTrainer, critic_path, load_critic, padded
from ..data.columns import is_in_memory
from ..evaluation.requests import SamplingSettings
from ..rollouts.engine import Engine
from ..rollouts.engine_failures import ServerFailure, stop_without_engine
from ..rollouts.engine_weights import WrongWeights
from ..rollouts.request_seeds import request_seed
from ..rollouts.timing import PARTS
from ..settings.checks import ignored_settings
from ..settings.fields import setting
from ..update.rollout import without_padding
from ..update.step_sizes import BatchSizes
from . import _critic
from ._critic import Answer, State


_SUCCESS_RATE_DECAY = 0.9
_RATIO_CAP = 2.0  # of the probability under the current critic to that under the one that generated an answer
# In place of the answers of a process that has fewer batches than another one; its weight is 0.
_NO_ANSWER = {"prompt": [0], "ids": [0, 0], "logps": [0.0, 0.0], "weight": 0.0}


@dataclass
class GenACConfig(ActorCriticConfig):
    """
    Configuration of [`GenACTrainer`]: every parameter of [`ActorCriticConfig`], and those of a generative critic.
    Defaults are the paper's if it states them.
    """

    rewards_are_labels = True
    critic_alone_setting = "critic_pretraining_steps"

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

    def errors(self, step: BatchSizes) -> list[str]:
        errors = super().errors(step)
        errors += ignored_settings(self, ["vllm_sync_adapter"], "the critic's weights are sent to vLLM, too")
        if not _critic.critic_prompt_path(self.critic_prompt).is_file():
            names = ", ".join(sorted(path.stem for path in _critic.CRITIC_PROMPTS.iterdir()))
            errors.append(
                f"critic_prompt={self.critic_prompt!r} is no template and no file in the working directory. Set it to "
                f"one of {names}, or to the path of a .txt file."
            )
        elif error := _critic.template_error(self.critic_prompt):
            errors.append(error)
        if self.max_completion_length is None:
            errors.append(
                "max_completion_length=None is not supported by GenAC: the critic's context must hold the longest "
                "response. Set a number."
            )
        return errors


@dataclass
class SegmentedCompletion:
    """
    A completion and its segments.

    Attributes:
        token_ids (int64 `np.ndarray`): All of its tokens, with tool results.
        policy_positions (`list[int]`): Indices in `token_ids` of the tokens that have a value: those that the policy
            generated, or none if the completion has no label.
        segment_starts (`list[int]`): Indices in `policy_positions` of the first token of each segment.
    """

    token_ids: np.ndarray
    policy_positions: list[int]
    segment_starts: list[int]


class GenACTrainer(ActorCriticTrainer):
    """
    Trainer for Generative Actor-Critic, with the arguments of [`~trl.GRPOTrainer`] and rewards in [0, 1]. `args` is a
    [`GenACConfig`]. Logs the metrics of [`~trl.GRPOTrainer`] and `genac/*`.
    """

    args: GenACConfig
    vllm_generation: Engine
    _success_rate: float | None  # smoothed; part of the critic's prompt
    _num_answers: int  # of all processes in training so far; seeds of answers without vLLM
    _critic_loss: torch.Tensor  # of an optimizer step so far
    _saved_attributes = (*ActorCriticTrainer._saved_attributes, "_success_rate", "_num_answers")
    _name = "GenAC"
    _config_class = GenACConfig
    _paper = {
        "title": "Bringing Value Models Back: Generative Critics for Value Modeling in LLM Reinforcement Learning",
        "id": "2604.10701",
    }

    def _create_critic(self, policy: str | PreTrainedModel, args: GenACConfig, arguments: dict[str, Any]):
        self._critic_prompt = _critic.CriticPrompt(args.critic_prompt)
        path = critic_path(policy, args)
        tokenizer = arguments["processing_class"]
        if tokenizer is None or args.critic_model_name_or_path is not None:
            tokenizer = AutoTokenizer.from_pretrained(
                path, padding_side="left", trust_remote_code=args.trust_remote_code
            )
        self._critic_tokenizer = tokenizer
        dataset = arguments["train_dataset"]
        prompts = dataset["prompt"] if is_in_memory(dataset) else []  # those of a stream are not known
        _critic.check_critic(policy, path, args, tokenizer, self._critic_prompt, prompts)
        critic = load_critic(policy, args)
        add_fused_lm_head(critic, outputs=("log_probs",))
        return critic

    def _set_up_update(self) -> None:
        super()._set_up_update()
        args = self.args
        self._batch_size = args.critic_batch_size or args.per_device_train_batch_size
        self.timer.parts = ("critic", *PARTS)
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        if num_parameters >= 1e8:
            size = f"{num_parameters / 1e9:.1f}B"
        else:
            size = f"{num_parameters / 1e6:.1f}M"
        model_name = get_config_model_id(self.model.config).rsplit("/")[-1]
        self._actor_name = f"{model_name}, {size} parameters"

    def _value_tokens(self, inputs, batch):
        mask = self._value_mask(batch)
        completions = self._segmented(batch, mask)
        states = self._states(inputs, batch, completions)
        answers = self._generate_answers(states)
        texts = [self._critic_tokenizer.decode(answer.ids) for answer in answers]
        parsed_values = [self._critic_prompt.parse(text) for text in texts]

        segment_values: list[list[float]] = [[] for _ in completions]
        for state, value in zip(states, parsed_values, strict=True):
            if state.begins_segment:
                segment_values[state.completion].append(0.0 if value is None else value)
        values = torch.zeros(mask.shape, device=mask.device)
        lambdas = torch.ones(mask.shape, device=mask.device)
        for i, completion in enumerate(completions):
            positions, starts = completion.policy_positions, completion.segment_starts
            if positions:
                token_values = _critic.token_values(segment_values[i], starts, len(positions))
                token_lambdas = _critic.border_lambdas(starts, len(positions), self.args.gae_lambda)
                values[i, positions] = token_values.to(mask.device)
                lambdas[i, positions] = token_lambdas.to(mask.device)

        answer_values = torch.tensor([math.nan if value is None else value for value in parsed_values])
        self._log_answers(states, answers, answer_values)
        if self.model.training:
            self._store_answers(batch, states, answers, answer_values)
            self._update_success_rate()
        return values, lambdas

    def _segmented(self, batch: dict, mask: torch.Tensor) -> list[SegmentedCompletion]:
        """Return the completions of a generation batch with their segments; `mask`, `(B, T)`, marks the tokens that
        have a value."""
        probabilities = self._token_probabilities(batch)
        completion_ids = without_padding(batch["completion_ids"], batch["completion_mask"])
        completions = []
        for token_ids, has_value, token_probabilities in zip(completion_ids, mask.cpu(), probabilities, strict=True):
            positions = has_value.nonzero()[:, 0].tolist()
            starts = _critic.segment_starts(
                token_probabilities[positions].tolist(),
                threshold=self.args.segment_probability,
                length=self.args.segment_length,
                max_segments=self.args.max_segments,
            )
            completions.append(SegmentedCompletion(token_ids, positions, starts))
        return completions

    @torch.no_grad()
    def _token_probabilities(self, batch: dict) -> torch.Tensor:
        """Return the probability of each token under the policy, `(B, T)` on the CPU; 1 where no segment depends on
        it."""
        if self.args.segment_probability is None:
            return torch.ones(batch["completion_ids"].shape)
        logps = batch.get("sampling_per_token_logps", batch.get("old_per_token_logps"))
        if logps is None:
            prompt_ids = without_padding(batch["prompt_ids"], batch["prompt_mask"])
            completion_ids = without_padding(batch["completion_ids"], batch["completion_mask"])
            logps = padded(self.compute_logps(prompt_ids, completion_ids), batch["completion_ids"].size(1))
        return logps.exp().nan_to_num(1.0).cpu()

    def _states(self, inputs, batch: dict, completions: Sequence[SegmentedCompletion]) -> list[State]:
        """Return the state before each segment, and in training also that before the last token."""
        is_training = self.model.training
        labels = batch["labels"].tolist()
        group_means = self._group_means(len(inputs))
        states = []
        for i, completion in enumerate(completions):
            positions = completion.policy_positions
            # Each state is followed by one of these tokens, indices in `positions`.
            next_tokens = list(completion.segment_starts)
            last_token = len(positions) - 1
            if is_training and positions and last_token not in next_tokens:
                next_tokens.append(last_token)
            for next_token in next_tokens:
                prefix = completion.token_ids[: positions[next_token]]
                outcome = labels[i]
                if is_training and next_token == 0:
                    outcome = group_means[i]  # before the first token, what the completions of the prompt share
                state = State(
                    problem=_critic.problem_text(inputs[i]["prompt"]),
                    response=self._tokenizer.decode(prefix, skip_special_tokens=True),
                    tokens_used=len(prefix),
                    completion=i,
                    begins_segment=next_token in completion.segment_starts,
                    outcome=outcome,
                )
                states.append(state)
        return states

    def _group_means(self, num_completions: int) -> list[float]:
        """Return the mean label of the group of each of the `num_completions` completions of this process."""
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        means_of_groups = self._labels.view(-1, group_size).nanmean(dim=1)  # of all processes
        means_of_completions = means_of_groups.repeat_interleave(group_size)
        first_of_process = self.accelerator.process_index * num_completions
        return means_of_completions[first_of_process : first_of_process + num_completions].tolist()

    def _generate_answers(self, states: Sequence[State]) -> list[Answer]:
        """Return the critic's answer about each state."""
        assert self.max_completion_length is not None  # refused by `GenACConfig.errors`
        actor = _critic.Actor(self._actor_name, self.max_completion_length, self._success_rate)
        texts = [self._critic_prompt.render(state, actor) for state in states]
        prompts = _critic.question_ids(self._critic_tokenizer, texts, self.chat_template_kwargs)
        # Processes generate together, so each needs equally many prompts; padding samples are discarded.
        num_prompts_by_process = gather_object([len(prompts)])
        num_prompts = max(num_prompts_by_process)
        if num_prompts == 0:  # no completion has a verdict
            return []
        padding = [[self._critic_tokenizer.eos_token_id]] * (num_prompts - len(prompts))
        first_answer = self._num_answers + sum(num_prompts_by_process[: self.accelerator.process_index])
        if self.model.training:
            self._num_answers += sum(num_prompts_by_process)
        seeds = [request_seed(f"{self.args.seed}/critic", first_answer + i) for i in range(num_prompts)]
        try:
            with self.timer.part("critic"):
                if self.use_vllm:
                    answers = self._answers_of_engine(prompts + padding)
                else:
                    answers = self._answers_of_model(prompts + padding, seeds)
        except (ServerFailure, WrongWeights) as failure:
            stop_without_engine(self, failure)
        return answers[: len(prompts)]

    @property
    def _temperature(self) -> float:
        """The temperature of answers: sampled in training, the most probable tokens in an evaluation."""
        return 1.0 if self.model.training else 0.0

    def _answers_of_model(self, prompts: list[list[int]], seeds: list[int]) -> list[Answer]:
        """Generate answers with `generate` of the critic, one per prompt (token ids) and seed."""
        settings = SamplingSettings(
            temperature=self._temperature,
            top_p=1.0,
            max_new_tokens=self.args.critic_max_new_tokens,
        )
        with (
            unwrap_model_for_generation(
                self.critic,
                self.accelerator,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as critic,
            self._dist.summon_full_params(self.critic, recurse=False),
        ):
            return _critic.generate_answers(
                critic,
                self._critic_tokenizer,
                prompts,
                seeds,
                settings,
                tag=self._critic_prompt.tags[1],
                batch_size=self._batch_size,
                synced=self.is_fsdp_enabled,
            )

    def _answers_of_engine(self, prompts: list[list[int]]) -> list[Answer]:
        """Generate answers with vLLM, one per prompt (token ids)."""
        sampling = {
            "temperature": self._temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": None,
            "repetition_penalty": 1.0,
            "max_completion_length": self.args.critic_max_new_tokens,
            "structured_outputs_regex": None,
            "generation_kwargs": {"stop": [self._critic_prompt.tags[1]], "include_stop_str_in_output": True},
        }
        engine = self.vllm_generation
        self._last_loaded_step = -1  # the policy's weights are sent again before its next generation
        with engine.using_weights_of(self.accelerator.unwrap_model(self.critic), **sampling):
            _, ids, logps, _ = engine.generate(prompts=prompts, images=None, num_generations=1)
        answers = []
        for prompt, answer_ids, answer_logps in zip(prompts, ids, logps, strict=True):
            if not answer_ids:
                answers.append(Answer(prompt, [self._critic_tokenizer.eos_token_id], [math.nan]))
                continue
            # vLLM returns the log-probs of one token as a list, with that of the generated token first
            logps_of_tokens = [math.nan if token[0] is None else token[0] for token in answer_logps]
            answers.append(Answer(prompt, list(answer_ids), logps_of_tokens))
        return answers

    def _log_answers(self, states: list[State], answers: list[Answer], values: torch.Tensor) -> None:
        """Log metrics over the answers of all processes; `values`, `(N,)`, are those of this process."""
        all_values = torch.tensor(gather_object(values.tolist()))
        all_outcomes = torch.tensor(gather_object([state.outcome for state in states]))
        begins_segment = gather_object([state.begins_segment for state in states])
        answer_lengths = gather_object([len(answer.ids) for answer in answers])
        num_completions = sum(gather_object([len({state.completion for state in states})]))
        self._log_values(
            critic_reward=_critic.critic_rewards(all_values, all_outcomes).double().mean().item(),
            brier=(all_outcomes - all_values.double().nan_to_num(0.0)).square().mean().item(),
            unparsed=all_values.isnan().double().mean().item(),
            segments=sum(begins_segment) / max(num_completions, 1),
            answer_length=sum(answer_lengths) / max(len(answer_lengths), 1),
            success_rate=math.nan if self._success_rate is None else self._success_rate,
        )

    def _store_answers(self, batch: dict, states: list[State], answers: list[Answer], values: torch.Tensor) -> None:
        """Store the answers with their completions, so that both are shuffled and saved together."""
        device = self.accelerator.device
        outcomes = torch.tensor([state.outcome for state in states])
        rewards = _critic.critic_rewards(values, outcomes).to(device)
        weights = _critic.reinforce_weights(rewards, outcomes.to(device), self._sum).tolist()
        batch["answers"] = [[] for _ in batch["labels"]]
        for state, answer, weight in zip(states, answers, weights, strict=True):
            batch["answers"][state.completion].append(answer._asdict() | {"weight": weight})
        num_tokens = sum(len(answer.ids) for answer in answers)
        batch["answer_tokens"] = self._sum(torch.tensor(num_tokens, device=device))

    def _update_success_rate(self) -> None:
        """Update the moving average with the mean label of the generation batch on all processes."""
        rate = self._labels.nanmean().item()
        if math.isnan(rate):
            return
        if self._success_rate is not None:
            rate = _SUCCESS_RATE_DECAY * self._success_rate + (1 - _SUCCESS_RATE_DECAY) * rate
        self._success_rate = rate

    def _train_critic(self, inputs: dict) -> None:
        answers = [answer for answers_of_completion in inputs["answers"] for answer in answers_of_completion]
        denominator = self._share_of_generation(inputs["answer_tokens"])
        loss = torch.zeros((), device=self.accelerator.device)
        # Processes need equally many batches.
        num_batches = max(1, *gather_object([math.ceil(len(answers) / self._batch_size)]))
        with self._critic_pass.attention():
            for i in range(num_batches):
                start = i * self._batch_size
                answer_batch = answers[start : start + self._batch_size] or [_NO_ANSWER]
                is_last = i == num_batches - 1
                with self._accumulating_critic(is_last):
                    losses = self._answer_losses(answer_batch)
                    self.accelerator.backward(losses.sum() / denominator)
                loss += losses.detach().sum() / denominator
        self._critic_loss = self._critic_loss + loss
        if self.accelerator.sync_gradients:
            mean_loss = self._sum(self._critic_loss).item() / self.accelerator.num_processes
            self._critic_loss = torch.zeros_like(loss)
            self._log_values(critic_loss=mean_loss, critic_grad_norm=self._step_critic())

    def _answer_losses(self, answers: list[dict]) -> torch.Tensor:
        """Return the losses of the tokens of some answers, concatenated, `(M,)`."""
        prompt_ids = [answer["prompt"] for answer in answers]
        answer_ids = [answer["ids"] for answer in answers]
        logps = torch.cat(self._critic_pass.compute_logps(self.critic, prompt_ids, answer_ids).logps)
        sampling_logps = torch.tensor([logp for answer in answers for logp in answer["logps"]], device=logps.device)
        weights = torch.tensor([answer["weight"] for answer in answers for _ in answer["ids"]], device=logps.device)
        return _critic.reinforce_losses(logps, sampling_logps, weights, _RATIO_CAP)

    def _reset_run(self) -> None:
        super()._reset_run()
        self._success_rate = None
        self._num_answers = 0
        self._critic_loss = torch.zeros((), device=self.accelerator.device)
