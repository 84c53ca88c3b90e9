"""How PACSTrainer and the baselines draw completions and have them judged, whatever is learnt from them.

- Every request to vLLM has a seed, so a resumed run draws what the first would have drawn ([`Engine`]).
- When a vLLM server dies, all processes save the state after the last optimizer step together and stop.
- More completions of some prompts can be drawn within a generation (`draw`), and rewards may ask for the policy's
  log-probabilities (`score`).
- What would fail after minutes is looked for before the model is loaded.
- FSDP2 exchanges gradients in float32.
- Every step says in a line what came of it, and where its time went.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from accelerate.utils import gather_object
from peft import LoraConfig
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    ProcessorMixin,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import get_config_model_id, is_async_callable

from ..data import check_chat_template_kwargs
from ..data.prompts import context_lengths
from ..rewards import code_reward, math_reward
from ..settings.command_line import FailedRun
from ..update.rows import Rollout, unpad_rollouts, weighted_rewards
from ..update.scorer import Scorer
from ..update.startup_check import choose_forward_pass, disable_noise
from .console import shorten_console
from .engine import Engine, ServerFailure
from .float32_exchange import keep_float32
from .lora import check_lora_targets
from .no_signal import NoSignalCallback
from .preemption import check_no_jit_checkpoint
from .published_trainer import PublishedTrainer
from .resume import request_seed
from .timing import StepTimer, TimingCallback
from .tools import check_tools, shared_turns_error, turns
from .trainer_checks import (
    OWN_PARAMETERS,
    check_columns,
    check_dataset,
    check_evaluation_batch,
    check_generation_kwargs,
    check_golds,
    check_number_of_prompts,
    check_prompt_lengths,
    check_prompts,
    check_reward_functions,
    with_checked_result,
)
from .vllm_checks import check_vllm, serve_command, server_url


_SIGNATURE = inspect.signature(GRPOTrainer.__init__)

# A run ends when its first generation batches, so many, have no reward at all. A later batch may.
_MOST_UNREWARDED = 3


class RolloutTrainer(PublishedTrainer):
    """[`~trl.GRPOTrainer`] that can generate again for some prompts, and checks what it is given before it loads the
    model."""

    _config_class: type[GRPOConfig] = GRPOConfig
    _padding_free = "auto"  # see `Scorer`
    _learns_with_scorer = True

    if not TYPE_CHECKING:  # type checkers and editors see the parameters of GRPOTrainer

        @wraps(GRPOTrainer.__init__)
        def __init__(self, *args, **kwargs):
            given = _SIGNATURE.bind(self, *args, **kwargs)
            given.apply_defaults()
            _, *arguments = given.arguments.items()
            self._construct(**dict(arguments))

    def _construct(self, model, reward_funcs, args, **arguments: Any) -> None:
        if args is None:
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = self._config_class(f"{model_name.split('/')[-1]}-{self._name}")
        if not isinstance(args, self._config_class):
            raise TypeError(f"`args` must be a {self._config_class.__name__}, got {type(args).__name__}.")
        environment_factory, rollout_func = arguments["environment_factory"], arguments["rollout_func"]
        check_reward_functions(reward_funcs)
        passed = (*OWN_PARAMETERS, *(["environments"] if environment_factory is not None else []))
        for name in ("train_dataset", "eval_dataset"):  # a rollout function adds columns of its own
            check_dataset(name, arguments[name], reward_funcs if rollout_func is None else (), passed)
        check_tools(arguments["tools"])
        self._prepare_loading(model, args, {"reward_funcs": reward_funcs, **arguments})
        if environment_factory is None and rollout_func is None:
            self._check_prompt_lengths(model, args, arguments)  # last: it may download the model's configuration
        super().__init__(model, reward_funcs, args, **arguments)
        self._prepare_run()
        if args.disable_dropout:
            disable_noise(self.model, self.ref_model)
        self._prepare_drawing()
        self._prepare_learning()

    def _prepare_loading(self, model: str | PreTrainedModel, args: GRPOConfig, arguments: dict[str, Any]) -> None:
        """
        What comes before the model is loaded.

        Args:
            arguments (`dict`): All other arguments of the trainer.

        Raises:
            `ValueError`: if a data set has no prompts, the vLLM that `args` asks for cannot work, or the model has not
            the
                modules that LoRA is for.
        """
        super()._prepare_loading(model, args, arguments)
        check_no_jit_checkpoint(args)
        for name in ("train_dataset", "eval_dataset"):
            if arguments["environment_factory"] is None:  # an environment writes into the prompt
                check_prompts(name, arguments[name])
        peft_config = arguments["peft_config"]
        check_generation_kwargs(args)
        if args.use_vllm:
            check_vllm(args, model if isinstance(model, str) else get_config_model_id(model.config))
        if isinstance(peft_config, LoraConfig):
            given = args.model_init_kwargs or {}
            check_lora_targets(
                peft_config,
                model,
                revision=given.get("revision"),
                trust_remote_code=given.get("trust_remote_code", args.trust_remote_code),
            )

    @staticmethod
    def _check_prompt_lengths(model: str | PreTrainedModel, args: GRPOConfig, arguments: dict[str, Any]) -> None:
        def load_tokenizer():
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            revision = (args.model_init_kwargs or {}).get("revision", "main")
            return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)

        given = arguments["processing_class"]
        if isinstance(given, ProcessorMixin):  # its prompts may hold images
            return
        config = None if isinstance(model, str) else model.config
        if config is None:
            given_to_model = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
            config = AutoConfig.from_pretrained(model, **given_to_model)
        evaluation = arguments["eval_dataset"]
        evaluations = evaluation if isinstance(evaluation, dict) else {"eval_dataset": evaluation}
        check_prompt_lengths(
            {"train_dataset": arguments["train_dataset"], **evaluations},
            args,
            load_tokenizer if given is None else lambda: given,
            arguments["tools"],
            context_lengths(config),
        )

    def _prepare_drawing(self) -> None:
        self._check_number_of_prompts()
        shorten_console(self.callback_handler.callbacks)
        self.timer = StepTimer()
        self.add_callback(TimingCallback(self.timer, self._record_seconds, self.accelerator.print))
        self.add_callback(NoSignalCallback(self))
        self.grades_answers = math_reward in self.reward_funcs
        self.grades_programs = code_reward in self.reward_funcs
        if self.grades_answers and self.accelerator.is_main_process:
            check_golds(self.train_dataset)
        self._num_groups = 0  # drawn so far
        self._forward_passes_are_chosen = False
        self._extra_of_rows: list[dict] | None = None  # `Rollout.extra` of this process, where a method has it
        if self.use_vllm:
            self.vllm_generation = Engine(self.vllm_generation, next_seeds=self._next_seeds, timer=self.timer)
        if self.rollout_func is not None:
            self.rollout_func = self._complete_rollouts(self.rollout_func)
        if self.tools:
            is_sharded = self.is_fsdp_enabled or is_deepspeed_zero3_enabled()
            if together := shared_turns_error(self.args, self.accelerator.num_processes, is_sharded):
                raise ValueError(together)
        if not self._is_vlm:  # a processor takes more keys than its template
            check_chat_template_kwargs(self.processing_class, self.chat_template_kwargs, self.chat_template)
            self.scorer = self._create_scorer(self.model)
            if self.ref_model is not None:  # of the KL term
                self.ref_scorer = self._create_scorer(self.accelerator.unwrap_model(self.ref_model))
        self.reward_funcs = [
            function if isinstance(function, nn.Module) else self._wrap_reward(i, function, name)
            for i, (function, name) in enumerate(zip(self.reward_funcs, self.reward_func_names, strict=True))
        ]

    def _prepare_learning(self) -> None:
        """What a method needs besides the rollouts, once everything is loaded."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        keep_float32(self.accelerator)

    def _create_scorer(self, model, temperature: float | None = None) -> Scorer:
        """`temperature` is that of the fused head if the model was not given one by TRL."""
        return Scorer(
            model,
            self.accelerator.device,
            pad_token_id=self._tokenizer.pad_token_id,
            padding_free=self._padding_free,
            temperature=self.temperature if temperature is None else temperature,
            autocast=self.accelerator.autocast,
        )

    def _choose_forward_passes(self) -> None:
        """Before anything is generated, see [`choose_forward_pass`]; once, on all processes together."""
        if self._forward_passes_are_chosen:
            return
        self._forward_passes_are_chosen = True
        if getattr(self.args, "startup_check", True):  # GRPO has no such key
            choose_forward_pass(self.scorer, self.model_wrapped, training=self.args.disable_dropout)
            if self.ref_model is not None:
                self.ref_scorer.packing, self.ref_scorer.fused = self.scorer.packing, self.scorer.fused

    def _record_seconds(self, name: str, seconds: float) -> None:
        self._metrics["train"][name].append(seconds)

    def _check_equal_on_all_processes(self, what: str, number: int) -> None:
        numbers = gather_object([number])
        if len(set(numbers)) > 1:
            raise ValueError(
                f"Processes disagree on the number of {what}: {numbers}. Groups would be torn apart, or a process "
                "would wait forever. All processes must load the same data with the same seed."
            )

    def _check_number_of_prompts(self) -> None:
        try:
            num_prompts = len(self.train_dataset)
        except TypeError:  # iterable data sets have no length
            return
        self._check_equal_on_all_processes("prompts in the training set", num_prompts)
        check_number_of_prompts(num_prompts, self.args)

    def get_eval_dataloader(self, eval_dataset=None):
        check_evaluation_batch(self.args.eval_batch_size, self.accelerator.num_processes, self.num_generations_eval)
        check_dataset("eval_dataset", eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    # Draw ---------------------------------------------------------------------------------------------------------

    def _next_seeds(self, num_requests: int) -> list[int]:
        # Processes that share one engine by tensor parallelism must agree on the seeds; a server has one stream.
        processes_per_engine = self.args.vllm_tensor_parallel_size
        stream = 0 if self.vllm_mode == "server" else self.accelerator.process_index // processes_per_engine
        if self.model.training:
            first = self._num_requests
            self._num_requests += num_requests
            return [request_seed(f"{self.args.seed}/{stream}", first + i) for i in range(num_requests)]
        # An evaluation has seeds of its own, so that training draws the same with and without it.
        step, first = self._evaluation_requests
        first = first if step == self.state.global_step else 0
        self._evaluation_requests = (self.state.global_step, first + num_requests)
        run = f"{self.args.seed}/{stream}/evaluation/{self.state.global_step}"
        return [request_seed(run, first + i) for i in range(num_requests)]

    def _generate_and_score_completions(self, inputs):
        self._choose_forward_passes()  # an evaluation without training, say
        self._check_equal_on_all_processes("rows of a generation batch", len(inputs))
        check_columns("The data set", inputs[0])
        with self.timer.part("other"):
            batch = super()._generate_and_score_completions(inputs)
        rows = self.accelerator.process_index * len(inputs) + torch.arange(len(inputs))  # among those of all processes
        num_generations = self.num_generations if self.model.training else self.num_generations_eval
        batch["labels"] = self._labels[rows.to(self._labels.device)]
        batch["groups"] = self._num_groups + rows // num_generations
        self._num_groups += len(self._labels) // num_generations
        if self._extra_of_rows is not None:
            batch["extra"] = self._extra_of_rows
        return batch

    def draw(
        self, inputs: Sequence[dict[str, Any]], num_generations: int, groups: Sequence[int] | None = None
    ) -> list[Rollout]:
        """
        Draw completions of some prompts with the current policy, and have them judged.

        Within a generation it may be called again, for some of the prompts and with another number of completions.
        Requests go on with the next seeds, and a run that is resumed draws the same.

        Args:
            inputs (sequence of `dict`):
                Rows of the data set, equally many on every process.
            num_generations (`int`):
                Completions of each.
            groups (sequence of `int`, *optional*):
                [`Rollout.group`] of each input's completions, if they join others of the same prompt. By default each
                input is a new group.

        Returns:
            `list[Rollout]`: the rows of this process, the completions of a prompt adjacent.
        """
        outside = self.num_generations, self.num_generations_eval
        self.num_generations = self.num_generations_eval = num_generations
        try:
            batch = self._generate_and_score_completions([dict(row) for row in inputs for _ in range(num_generations)])
        finally:
            self.num_generations, self.num_generations_eval = outside
        if groups is not None:
            batch["groups"] = torch.tensor(groups).repeat_interleave(num_generations)
        return unpad_rollouts(batch)

    def _generate(self, prompts):
        try:
            with self.timer.part("generation"):
                generated = super()._generate(prompts)
        except ServerFailure as failure:
            self._stop_without_server(failure)
        if self.tools:
            numbers = self.accelerator.gather(torch.tensor(turns(generated[3]), device=self.accelerator.device))
            self._metrics["train" if self.model.training else "eval"]["tools/turns"].append(numbers.mean().item())
        return generated

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self._end_empty_completions(completion_ids, logprobs)
        return completion_ids, logprobs

    def _end_empty_completions(self, completion_ids, logprobs, env_mask=None) -> None:
        """An engine that strips the end-of-sequence token returns nothing for a completion that ends at once."""
        empty = [i for i, ids in enumerate(completion_ids) if len(ids) == 0]
        for i in empty:
            completion_ids[i] = [self._tokenizer.eos_token_id]
            if logprobs is not None:
                logprobs[i] = [None]
            if env_mask is not None:
                env_mask[i] = [1]
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["completions/empty_ratio"].append(len(empty) / max(len(completion_ids), 1))

    def _complete_rollouts(self, rollout_func):
        def complete(prompts, trainer):
            output = rollout_func(prompts, trainer)
            completion_ids = output.get("completion_ids", [])  # the parent names missing keys
            if "completion_ids" in output and len(completion_ids) != len(prompts):
                raise ValueError(
                    f"rollout_func returned {len(completion_ids)} completions for {len(prompts)} prompts. Each prompt "
                    "stands in the batch once per generation already; return exactly one completion for each."
                )
            self._end_empty_completions(completion_ids, output.get("logprobs"), output.get("env_mask"))
            return output

        return complete

    def _stop_without_server(self, failure: ServerFailure, engine: Engine | None = None) -> NoReturn:
        """Save the state between the last two optimizer steps, on all processes, and raise. `engine`: whose server it
        is."""
        url, model = server_url(self.args), self.model
        if engine is not None:
            url, model = engine.server_base_url, engine.model
        step = self.state.global_step
        if self._step_begin is not None and self._step_begin["global_step"] == step:
            self._rewind_step()
        kept = "Nothing had been learnt yet"
        if step > 0:
            if self._saved_step != step:  # else it would be written over, and lost if that is interrupted
                save_only_model, self.args.save_only_model = self.args.save_only_model, False
                self._save_checkpoint(self.model, trial=None)
                self.args.save_only_model = save_only_model
            kept = f"The state after it is in {Path(self.args.output_dir) / f'checkpoint-{step}'}"
        raise FailedRun(
            f"The vLLM server at {url} {failure.state} after optimizer step {step} ({failure.cause}). "
            f"{kept}. Mend the cause, start the server again if it is down: {serve_command(model.name_or_path)} and "
            "continue with `--resume_from_checkpoint last`."
        ) from failure

    # Judge --------------------------------------------------------------------------------------------------------

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self._extra_of_rows = None
        with self.timer.part("verification"):
            truncated = self.are_truncated(completion_ids_list)
            inputs = [{**row, "truncated": cut} for row, cut in zip(inputs, truncated, strict=True)]
            rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._labels = self._labels_of(rewards_per_func)
        if self.model.training and self._unrewarded is not None:
            self._unrewarded = self._unrewarded + 1 if self._labels.isnan().all() else None
            if self._unrewarded == _MOST_UNREWARDED:
                self._stop_without_rewards()
        return rewards_per_func

    def _stop_without_rewards(self) -> NoReturn:
        raise FailedRun(
            f"The reward functions ({', '.join(self.reward_func_names)}) returned None for every completion of the "
            "first "
            f"{self._unrewarded} generation batches, so nothing has been learned. Return numbers in [0, 1], and check "
            "the columns that the functions read."
        )

    def are_truncated(self, completion_ids: Sequence[Sequence[int]]) -> list[bool]:
        """Which completions do not end with an end-of-sequence token: those of TRL's `completions/clipped_ratio`."""
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        return [len(ids) == 0 or ids[-1] not in ends for ids in completion_ids]

    def _labels_of(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """Of the rows of all processes, what is learnt from."""
        return weighted_rewards(rewards_per_func, self.reward_weights)

    def _wrap_reward(self, index: int, function: Callable, name: str) -> Callable:
        """Return a reward function as the parent calls it; `index` is its place among the reward functions."""
        return with_checked_result(self._with_own_arguments(function, name), name)

    def reward_arguments(self) -> dict[str, Any]:
        """Return what reward functions with a parameter of that name get besides the columns of the data set.
        Extension point: rewards that need the policy's log-probs."""
        return {"score": self.score}

    def _with_own_arguments(self, function: Callable, name: str) -> Callable:
        """Return a reward function that gets those of `reward_arguments` that it has a parameter for."""
        own = self.reward_arguments()
        own = {key: value for key, value in own.items() if key in inspect.signature(function).parameters}
        if not own:
            return function
        if is_async_callable(function):
            raise ValueError(
                f"The reward function {name!r} is asynchronous and asks for `{next(iter(own))}`, whose forward passes "
                "all processes make together, in one order. Write it as a plain function."
            )

        @wraps(function)
        def call(*args, **kwargs):
            return function(*args, **(own | kwargs))

        return call

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._choose_forward_passes()
        return prepared

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        output = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        if self._unrewarded and self.state.global_step >= self.state.max_steps:
            self._stop_without_rewards()
        return output

    @torch.no_grad()
    def score(
        self, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """
        Log-probabilities of any completions under the current policy, for rewards that depend on it.

        All processes must call it equally often; each with any number of rows, also with none. There is no gradient.

        Args:
            prompt_ids, completion_ids (sequences of `B` sequences of `int`):
                Tokens of each row; at least one of the prompt.

        Returns:
            `list[torch.Tensor]`: of each row, float32 of shape `(C,)` on the CPU, in nats, at the `temperature` of
            training.
        """
        self._choose_forward_passes()
        size = self.args.per_device_train_batch_size
        passes = max(gather_object([-(-len(prompt_ids) // size)]))
        logps: list[torch.Tensor] = []
        with self.timer.part("log_probs"):
            for start in range(0, passes * size, size):
                prompts, completions = prompt_ids[start : start + size], completion_ids[start : start + size]
                if len(prompts) == 0:  # the others have more rows
                    prompts, completions = [[0]], [[0]]
                logps += [values.cpu() for values in self.scorer.score(self.model_wrapped, prompts, completions).logps]
        return logps[: len(prompt_ids)]

    # Learn --------------------------------------------------------------------------------------------------------

    def training_step(self, model, inputs, num_items_in_batch=None):
        with self.timer.part("update"):
            return super().training_step(model, inputs, num_items_in_batch)
