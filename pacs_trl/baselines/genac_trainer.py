"""GenACTrainer: an actor with a critic that reasons before it says a value (arXiv 2604.10701).

The critic is a causal language model. Before each segment of a completion it is asked, in words, how likely the
completion is to end
right (`critic_prompt.py`), and what it writes ends with an integer. Its answers are rewarded by how near they came,
and learnt from by REINFORCE. All that is not about such a critic is in `actor_critic.py`; no official code exists.

With vLLM one engine serves both models in turn, which is sent the weights of the one that writes before each
generation; or the critic has a server of its own.
"""

import math
import random
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel
from trl.models.utils import disable_gradient_checkpointing, unwrap_model_for_generation
from trl.trainer.utils import add_fused_lm_head, get_config_model_id

from ..evaluation.requests import SamplingSettings
from ..rollouts.engine import Engine, ServerFailure
from ..rollouts.resume import request_seed
from ..rollouts.timing import PARTS
from ..update.rows import labels_from_rewards, without_padding
from .actor_critic import ActorCriticTrainer, critic_path, load_critic
from .critic_answers import (
    AfterAnswer,
    check_critic,
    critic_tokenizer,
    engine_settings,
    generate_answers,
    own_server,
    problem_of,
    question_ids,
)
from .critic_objective import critic_rewards, mean_ranking_accuracy, reinforce_losses, reinforce_weights, value_scores
from .critic_prompt import Actor, CriticPrompt, State
from .critic_traces import read_traces
from .genac_config import GenACConfig
from .segments import border_lambdas, of_tokens, segment_starts


SUCCESS_RATE_DECAY = 0.9
CANDIDATES = (2, 4, 8)


class Asked(NamedTuple):
    """
    A state of a completion that the critic is asked about.

    Attributes:
        row (`int`): The completion.
        segment (`int`, *optional*): The segment that begins there; `None` for a state that is only learnt from.
        state ([`State`]): What the critic is told.
        outcome (`float`): What its value is compared with.
    """

    row: int
    segment: int | None
    state: State
    outcome: float


class GenACTrainer(ActorCriticTrainer):
    """
    Trainer for Generative Actor-Critic.

    The rollouts are those of [`~trl.GRPOTrainer`], with rewards in [0, 1]. Logs the metrics of [`~trl.GRPOTrainer`]
    and `genac/*`, see docs/metrics.md.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]): Model id, path, or instance.
        reward_funcs (`RewardFunc` or `list[RewardFunc]`): As in [`~trl.GRPOTrainer`]; their weighted sum must lie in
        [0, 1]. A
            completion for which all of them return `None` is left out.
        args ([`GenACConfig`], *optional*): Configuration of this trainer. If `None`, a default configuration is used.

    All other arguments are those of [`~trl.GRPOTrainer`].
    """

    args: GenACConfig
    _own_shared_settings = (
        *ActorCriticTrainer._own_shared_settings,
        *("critic_prompt", "critic_max_new_tokens", "critic_lora_r", "critic_extra_states", "critic_baseline"),
        *("segment_probability", "segment_length", "max_segments", "critic_ratio_cap", "critic_pretraining_steps"),
    )
    _counters = (*ActorCriticTrainer._counters, "_success_rate", "_num_answers")
    _tag_names = ["trl", "genac"]
    _name = "GenAC"
    _config_class = GenACConfig
    _paper = {
        "title": "Bringing Value Models Back: Generative Critics for Value Modeling in LLM Reinforcement Learning",
        "id": "2604.10701",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{shan2026bringing,
                title        = {{Bringing Value Models Back: Generative Critics for Value Modeling in LLM
                                Reinforcement Learning}},
                author       = {Zikang Shan and Han Zhong and Liwei Wang and Li Zhao},
                year         = 2026,
                eprint       = {arXiv:2604.10701},
            }"""),
    }

    def _create_critic(self, policy: str | PreTrainedModel, args: GenACConfig, arguments: dict[str, Any]):
        self._prompt = CriticPrompt.read(args.critic_prompt)
        path = critic_path(policy, args)
        self._critic_tokenizer = critic_tokenizer(path, args, arguments["processing_class"])
        dataset = arguments["train_dataset"]
        prompts = dataset["prompt"] if hasattr(dataset, "__len__") else []
        check_critic(policy, path, args, self._critic_tokenizer, self._prompt, prompts)
        critic = load_critic(policy, args)
        self._ending = AfterAnswer(self._critic_tokenizer, self._prompt.tags[1], critic.config.vocab_size)
        add_fused_lm_head(critic, outputs=("log_probs",))
        if args.critic_lora_r is None:
            return critic
        if args.gradient_checkpointing:
            critic.enable_input_require_grads()
        rank = args.critic_lora_r
        return get_peft_model(critic, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))

    def _prepare_learning(self) -> None:
        super()._prepare_learning()
        self._is_started = False
        self.timer.parts = {"critic": "values that the critic writes", **PARTS}
        size = sum(parameter.numel() for parameter in self.model.parameters())
        self._critic_engine: Engine | None = None
        if self.args.critic_vllm_server_base_url is not None:
            server = own_server(self.args, self.accelerator, self.critic, self._critic_tokenizer)
            self._critic_engine = Engine(server, next_seeds=self._next_seeds, timer=self.timer)
        self._actor_name = f"{get_config_model_id(self.model.config).rsplit('/')[-1]}, {_in_words(size)} parameters"

    def _labels_of(self, rewards_per_func):
        return labels_from_rewards(rewards_per_func, self.reward_weights, self.reward_func_names)

    # Values -------------------------------------------------------------------------------------------------------

    def _judge(self, inputs, batch):
        mask = self._value_mask(batch)
        owns = [row.nonzero()[:, 0].tolist() for row in mask.cpu()]  # tokens of the policy, by position
        starts = self._segments(batch, owns)
        asked = self._states(inputs, batch, owns, starts)
        answers = self._ask([each.state for each in asked])
        read = [self._prompt.parse(self._critic_tokenizer.decode(ids)) for _, ids, _ in answers]
        values = torch.tensor([math.nan if value is None else value for value in read])

        of_segments: list[list[float]] = [[] for _ in owns]
        for each, value in zip(asked, read, strict=True):
            if each.segment is not None:
                of_segments[each.row].append(value or 0.0)
        of_rows = torch.zeros(mask.shape, device=mask.device)
        lambdas = torch.ones(mask.shape, device=mask.device)
        for i, own in enumerate(owns):
            if own:
                of_rows[i, own] = of_tokens(of_segments[i], starts[i], len(own)).to(mask.device)
                lambdas[i, own] = border_lambdas(starts[i], len(own), self.args.gae_lambda).to(mask.device)
        self._log_answers(asked, values, answers, batch)
        if self.model.training:
            self._keep_answers(batch, asked, answers, values)
            rate = self._labels.nanmean().item()
            if rate == rate:
                decay = SUCCESS_RATE_DECAY if self._success_rate is not None else 0.0
                self._success_rate = decay * (self._success_rate or 0.0) + (1 - decay) * rate
        return of_rows, lambdas

    @torch.no_grad()
    def _segments(self, batch: dict, owns: list[list[int]]) -> list[list[int]]:
        """Of each completion where its segments begin, counted over the tokens of the policy."""
        logps = None
        if self.args.segment_probability is not None:
            logps = batch.get("sampling_per_token_logps", batch.get("old_per_token_logps"))
            if logps is None:
                ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
                attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
                size = self.args.per_device_train_batch_size
                with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
                    logps, *_ = self._get_per_token_logps_and_entropies(
                        self.model, ids, attention, batch["completion_ids"].size(1), batch_size=size
                    )
        probabilities = (
            torch.ones(batch["completion_ids"].shape) if logps is None else logps.exp().nan_to_num(1.0).cpu()
        )
        rule = {"length": self.args.segment_length, "most": self.args.max_segments}
        return [
            segment_starts(probabilities[i, own].tolist(), threshold=self.args.segment_probability, **rule)
            for i, own in enumerate(owns)
        ]

    def _states(self, inputs, batch: dict, owns: list[list[int]], starts: list[list[int]]) -> list[Asked]:
        """A state per segment, and in training the one before the last token."""
        extra = self.model.training and self.args.critic_extra_states
        labels, pooled = batch["labels"].tolist(), self._pooled_labels(len(inputs))
        completions = without_padding(batch["completion_ids"], batch["completion_mask"])
        asked = []
        for i, own in enumerate(owns):
            problem = problem_of(inputs[i]["prompt"])
            places: list[tuple[int | None, int]] = list(enumerate(starts[i]))
            if extra and own and starts[i][-1] != len(own) - 1:
                places.append((None, len(own) - 1))
            for segment, start in places:
                prefix = completions[i][: own[start]]
                text = self._tokenizer.decode(prefix, skip_special_tokens=True)
                outcome = pooled[i] if extra and start == 0 else labels[i]
                asked.append(Asked(i, segment, State(problem, text, len(prefix)), outcome))
        return asked

    def _pooled_labels(self, num_rows: int) -> list[float]:
        """Of each row the mean label of its prompt's completions, on all processes."""
        n = self.num_generations if self.model.training else self.num_generations_eval
        means = self._labels.view(-1, n).nanmean(dim=1).repeat_interleave(n)
        first = self.accelerator.process_index * num_rows
        return means[first : first + num_rows].tolist()

    def _ask(self, states: Sequence[State]) -> list[tuple[list[int], list[int], list[float]]]:
        """Of each state the tokens of question and answer, and the log-probabilities of the latter."""
        actor = Actor(self._actor_name, self.max_completion_length, self._success_rate)
        texts = [self._prompt.render(state, actor) for state in states]
        questions = question_ids(self._critic_tokenizer, texts, self.args)
        # Processes generate together, so each has equally many; what is written for that alone is dropped.
        counts = gather_object([len(questions)])
        if max(counts) == 0:  # no completion has a verdict
            return []
        padded = questions + [[self._critic_tokenizer.eos_token_id]] * (max(counts) - len(questions))
        first = self._num_answers + sum(counts[: self.accelerator.process_index])
        self._num_answers += sum(counts) * self.model.training
        seeds = [request_seed(f"{self.args.seed}/critic", first + i) for i in range(len(padded))]
        try:
            with self.timer.part("critic"):
                answers = self._ask_engine(padded) if self.use_vllm else self._ask_model(padded, seeds)
        except ServerFailure as failure:
            self._stop_without_server(failure, self._critic_engine)
        return [(question, *answer) for question, answer in zip(questions, answers, strict=False)]

    def _ask_model(self, questions: list[list[int]], seeds: list[int]) -> list[tuple[list[int], list[float]]]:
        args = self.args
        temperature = 1.0 if self.model.training else 0.0
        settings = SamplingSettings(temperature=temperature, top_p=1.0, max_new_tokens=args.critic_max_new_tokens)
        with (
            unwrap_model_for_generation(
                self.critic, self.accelerator, gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs
            ) as critic,
            self._dist.summon_full_params(self.critic, recurse=False),
        ):
            return generate_answers(
                critic,
                self._critic_tokenizer,
                questions,
                seeds,
                settings,
                ending=self._ending,
                batch_size=args.critic_batch_size or args.per_device_train_batch_size,
                synced=self.is_fsdp_enabled,
            )

    def _ask_engine(self, questions: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        sampling = engine_settings(self.args, self._prompt.tags[1], 1.0 if self.model.training else 0.0)
        engine = self._critic_engine
        if engine is None:
            engine, self._last_loaded_step = self.vllm_generation, -1  # the policy's weights are sent again
        with engine.lent_to(self.accelerator.unwrap_model(self.critic), **sampling):
            _, ids, logps, _ = engine.generate(prompts=questions, images=None, num_generations=1)
        end = self._critic_tokenizer.eos_token_id
        known = [[math.nan if one[0] is None else one[0] for one in row] for row in logps]
        return [(list(own), row) if own else ([end], [math.nan]) for own, row in zip(ids, known, strict=True)]

    def _log_answers(self, asked: list[Asked], values: torch.Tensor, answers, batch: dict) -> None:
        """Over the answers of all processes."""
        labels, groups = batch["labels"].tolist(), batch["groups"].tolist()
        last = {each.row: value for each, value in zip(asked, values.nan_to_num(0.0).tolist(), strict=True)}
        rows = gather_object([(groups[i], value, labels[i] > 0.5) for i, value in last.items()])
        known = gather_object(
            [
                (value, each.outcome, each.segment is not None, len(ids))
                for each, value, (_, ids, _) in zip(asked, values.tolist(), answers, strict=True)
            ]
        )
        by_group: dict[int, tuple[list, list]] = {}
        for group, value, right in rows:
            for place, item in enumerate((value, right)):
                by_group.setdefault(group, ([], []))[place].append(item)
        of_values, outcomes = (torch.tensor([each[i] for each in known]) for i in range(2))
        scores = value_scores(of_values, outcomes)
        self._log_values(
            critic_reward=scores["reward"],
            brier=scores["brier"],
            unparsed=scores["unparsed"],
            segments=sum(each[2] for each in known) / max(len(rows), 1),
            answer_length=sum(each[3] for each in known) / max(len(known), 1),
            success_rate=math.nan if self._success_rate is None else self._success_rate,
            **{f"ranking_accuracy_{m}": mean_ranking_accuracy([*by_group.values()], m) for m in CANDIDATES},
        )

    # Learning -----------------------------------------------------------------------------------------------------

    def _keep_answers(self, batch: dict, asked: list[Asked], answers, values: torch.Tensor) -> None:
        """Put the answers to the rows that they are about, with what each is worth; so they are shuffled and saved
        with them."""
        outcomes = torch.tensor([each.outcome for each in asked])
        rewards = critic_rewards(values, outcomes)
        device = self.accelerator.device
        weights = reinforce_weights(
            rewards.to(device), outcomes.to(device), self.args.critic_baseline, lambda own: self._sum(own)
        ).tolist()
        batch["answers"] = [[] for _ in batch["labels"]]
        for each, (question, ids, logps), weight in zip(asked, answers, weights, strict=True):
            batch["answers"][each.row].append({"question": question, "ids": ids, "logps": logps, "weight": weight})
        tokens = sum(len(ids) for _, ids, _ in answers)
        batch["answer_tokens"] = self._sum(torch.tensor(tokens, device=device))

    def _learn_critic(self, inputs: dict) -> None:
        answers = [answer for row in inputs["answers"] for answer in row]
        denominator = self._share_of_generation(inputs["answer_tokens"])
        total = torch.zeros((), device=self.accelerator.device)
        with self._critic_scorer.attention():
            for part, is_last in self._parts(answers):
                with self._second_model.accumulating(is_last):
                    losses = self._answer_losses(part)
                    self.accelerator.backward(losses.sum() / denominator)
                total += losses.detach().sum() / denominator
        self._critic_loss = self._critic_loss + total
        if self.accelerator.sync_gradients:
            loss = self._sum(self._critic_loss).item() / self.accelerator.num_processes
            self._critic_loss = torch.zeros_like(total)
            self._log_values(critic_loss=loss, critic_grad_norm=self._second_model.step())

    def _parts(self, answers: list[dict]):
        """Forward passes over answers, equally many on all processes, and whether each is the last."""
        size = self.args.critic_batch_size or self.args.per_device_train_batch_size
        number = max(1, *gather_object([-(-len(answers) // size)]))
        nothing = {"question": [0], "ids": [0], "logps": [0.0], "weight": 0.0}
        for i in range(number):
            yield answers[i * size : (i + 1) * size] or [nothing], i == number - 1

    def _answer_losses(self, answers: list[dict]) -> torch.Tensor:
        """Of the tokens of some answers, one after the other."""
        scores = self._critic_scorer.score(self.critic, *([a[name] for a in answers] for name in ("question", "ids")))
        logps = torch.cat(scores.logps)
        drawn = torch.tensor([x for answer in answers for x in answer["logps"]], device=logps.device)
        weights = torch.tensor([a["weight"] for a in answers for _ in a["ids"]], device=logps.device)
        return reinforce_losses(logps, drawn, weights, self.args.critic_ratio_cap)

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is None and self.args.critic_sft_dataset is not None and not self._is_started:
            self._start_supervised()
        self._is_started = True  # a second run of this trainer goes on with the critic of the first
        return prepared

    def _start_supervised(self) -> None:
        """Fine-tune the critic on traces, with an optimizer that is forgotten."""
        args, actor = self.args, Actor(self._actor_name, self.max_completion_length, None)
        traces = read_traces(args.critic_sft_dataset, self._prompt)
        texts = [self._prompt.render(t.state, actor._replace(success_rate=t.success_rate)) for t in traces]
        questions = question_ids(self._critic_tokenizer, texts, args)
        ids = self._critic_tokenizer([t.answer for t in traces], add_special_tokens=False)["input_ids"]
        rows = list(zip(questions, ids, strict=True))
        optimizer = self._second_model.create_optimizer(self.critic, args.critic_sft_learning_rate)
        process, processes = self.accelerator.process_index, self.accelerator.num_processes
        size = (args.critic_batch_size or args.per_device_train_batch_size) * processes
        losses = []
        for epoch in range(args.critic_sft_epochs):
            random.Random(f"{args.seed}/{epoch}").shuffle(rows)
            for start in range(0, len(rows), size):
                batch = rows[start : start + size]
                own = batch[process::processes]
                asked, answers = zip(*(own or batch[:1]), strict=True)
                with self._critic_scorer.attention():
                    logps = torch.cat(self._critic_scorer.score(self.critic, asked, answers).logps)
                    loss = -logps.sum() * bool(own) / sum(len(answer) for _, answer in batch) * processes
                    loss.backward()
                self.accelerator.clip_grad_norm_(self.critic.parameters(), args.max_grad_norm or math.inf)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(self._sum(loss.detach()).item() / processes)
        self.accelerator.print(
            f"Supervised start of the critic: {len(rows)} traces, {len(losses)} steps, nats per token from "
            f"{losses[0]:.3f} to {losses[-1]:.3f}."
        )

    # Checkpoints --------------------------------------------------------------------------------------------------

    def _reset_run(self) -> None:
        super()._reset_run()
        self._success_rate: float | None = None  # smoothed; what the critic is told of the policy
        self._num_answers = 0  # so far, of all processes; without vLLM their seeds
        self._critic_loss = torch.zeros((), device=self.accelerator.device)

    def _own_state(self):
        return super()._own_state() | {"success_rate": self._success_rate, "num_answers": self._num_answers}

    def _load_own_state(self, checkpoint, state):
        super()._load_own_state(checkpoint, state)
        self._success_rate, self._num_answers = state["success_rate"], state["num_answers"]


def _in_words(number: int) -> str:
    """`4.0B`, `0.6M`."""
    return f"{number / 1e9:.1f}B" if number >= 1e8 else f"{number / 1e6:.1f}M"
