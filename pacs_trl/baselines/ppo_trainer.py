"""PPOTrainer, and the base trainer of actor-critic methods: TRL's GRPOTrainer with per-token advantages from a critic.

The parent class provides generation, rewards, the clipped policy loss, the KL term, and logging, so these methods
differ from GRPO only in the advantage. A subclass implements the critic (`_create_critic`), its values for the tokens
of a generation batch (`_value_tokens`), and its loss on a micro-batch (`_train_critic`). All forward passes use a
[`ForwardPass`], without padding where the model supports packing.
"""

import contextlib
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForTokenClassification, PreTrainedModel, get_scheduler, set_seed
from trl.trainer.utils import create_model_from_path, disable_dropout_in_model, get_config_model_id

from ..errors import UserError
from ..rollouts.rollout_trainer import RolloutTrainer
from ..update.peft_models import without_peft
from ..update.rollout import without_padding
from ..update.startup_check import choose_forward_pass, disable_noise
from .gae import clipped_value_losses, explained_variance, generalized_advantages, masked_mean_and_variance, whiten
from .ppo_config import ActorCriticConfig, PPOConfig


def critic_path(policy: str | PreTrainedModel, args: ActorCriticConfig) -> str:
    """Return the path of the critic: `critic_model_name_or_path`, or by default that of the policy. Raises a
    `ValueError` if the policy was built in memory."""
    policy_path = policy if isinstance(policy, str) else get_config_model_id(policy.config)
    if path := args.critic_model_name_or_path or policy_path:
        return path
    raise UserError(
        "The policy was built in memory, so there is no path from which its critic could be loaded. Save it and pass "
        "the directory as `model`, or set critic_model_name_or_path."
    )


def load_critic(policy: str | PreTrainedModel, args: ActorCriticConfig, **more: Any):
    """Load a critic from [`critic_path`] for training, in float32. `model_init_kwargs` apply to it too, except
    `revision` if `critic_model_name_or_path` is set. `more` are further arguments of TRL's `create_model_from_path`:
    `architecture`, by default that of the checkpoint, and those of `from_pretrained`."""
    kwargs = {**(args.model_init_kwargs or {}), "dtype": "float32", "device_map": None, **more}
    kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    is_other_model = args.critic_model_name_or_path is not None
    if is_other_model:
        kwargs.pop("revision", None)
    policy_in_memory = None if isinstance(policy, str) else policy
    if policy_in_memory is not None:
        kwargs.setdefault("attn_implementation", policy_in_memory.config._attn_implementation)
    critic = create_model_from_path(critic_path(policy, args), **kwargs)
    if policy_in_memory is not None and not is_other_model and args.process_index == 0:
        _check_weights_of_path(policy_in_memory, critic)
    if args.disable_dropout:
        disable_dropout_in_model(critic)
        disable_noise(critic)
    if args.gradient_checkpointing:
        critic.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)
    return critic.train()


def _check_weights_of_path(policy: PreTrainedModel | PeftModel, critic: PreTrainedModel) -> None:
    """Raise a `ValueError` if the policy in memory has other weights than its path, where `critic` was loaded from.
    The policy may have been rounded, also to bfloat16 and back."""
    base = without_peft(policy)
    weights_of_path = dict(critic.base_model.named_parameters())
    for name, weight in base.base_model.named_parameters():
        name_without_peft = name.replace(".base_layer", "").replace(".original_module", "")
        weight_of_path = weights_of_path.get(name_without_peft)
        if weight_of_path is None or not weight.is_floating_point():  # of an adapter, or quantized
            continue
        expected = weight_of_path.detach().to(weight.device)
        is_equal = weight.shape == expected.shape and (
            torch.equal(weight, expected.to(weight.dtype)) or torch.equal(weight, expected.bfloat16().to(weight.dtype))
        )
        if not is_equal:
            raise UserError(
                f"The policy was changed in memory ({name}), but its critic would be loaded from "
                f"{get_config_model_id(base.config)} without these changes. Save the policy and pass the directory as "
                "`model`, or set critic_model_name_or_path."
            )


class ActorCriticTrainer(RolloutTrainer):
    """[`RolloutTrainer`] with a critic, configured by an [`ActorCriticConfig`]."""

    args: ActorCriticConfig
    critic: Any  # the model that estimates values, wrapped like the policy
    _last_logps: torch.Tensor  # of the tokens of the last forward pass, without gradient
    _step_sums: dict[str, Any]  # metrics of an optimizer step, summed over its tokens
    _critic_has_values = False  # whether the critic has one output per token instead of logits
    _equal_settings = ("world_size",)
    optimizer_settings = ("learning_rate",)  # the optimizer of the critic is created with the trainer

    def _set_up_update(self) -> None:
        if self.is_fsdp_enabled and not self.accelerator.is_fsdp2:
            raise UserError(
                f"{type(self).__name__} supports FSDP2 only. Set fsdp_version: 2 in the accelerate config file."
            )
        self._critic_pass = self.create_forward_pass(self.critic, temperature=1.0)
        names_with_decay = set(self.get_decay_parameter_names(self.critic))
        with_decay, without_decay = [], []
        for name, parameter in self.critic.named_parameters():
            if name in names_with_decay:
                with_decay.append(parameter)
            else:
                without_decay.append(parameter)
        groups = [
            {"params": with_decay, "weight_decay": self.args.weight_decay},
            {"params": without_decay, "weight_decay": 0.0},
        ]
        optimizer_class, kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.critic)
        optimizer = optimizer_class(groups, **kwargs | {"lr": self.args.critic_learning_rate})
        self.critic, self._critic_optimizer = self.accelerator.prepare(self.critic, optimizer)
        self.forward_pass.entropies_have_gradient = self._entropy_bonus_enabled

    def _before_loading(self, model, args, arguments):
        if args.deepspeed_plugin is not None:
            raise UserError(
                f"{type(self).__name__} does not support DeepSpeed, which trains one model per process. Use DDP or "
                "FSDP2 (recipes/accelerate_configs)."
            )
        if args.vllm_importance_sampling_correction and not args.use_vllm:
            raise UserError(
                "vllm_importance_sampling_correction=True would be ignored: with a critic only the log-probs of vLLM "
                "are corrected. Set use_vllm=True, or remove the key."
            )
        super()._before_loading(model, args, arguments)
        # Created before the policy, which sets the seed again, so that rollouts are the same as those of GRPO.
        self.critic = self._create_critic(model, args, arguments)

    def create_scheduler(self, num_training_steps, optimizer=None):
        self._critic_scheduler = get_scheduler(
            self.args.lr_scheduler_type,
            optimizer=self._critic_optimizer,
            num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
            num_training_steps=num_training_steps,
            scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
        )
        return super().create_scheduler(num_training_steps, optimizer)

    def _choose_forward_passes(self) -> None:
        if not self._forward_passes_are_chosen and self.args.startup_check:
            choose_forward_pass(
                self._critic_pass,
                self.critic,
                values=self._critic_has_values,
                training=self.args.disable_dropout,
                has_dropout=not self.args.disable_dropout,
            )
        super()._choose_forward_passes()

    @abstractmethod
    def _create_critic(self, policy: str | PreTrainedModel, args, arguments: dict[str, Any]) -> torch.nn.Module:
        """Create the critic from the policy or its path; `arguments` are those of `_before_loading`."""

    @abstractmethod
    def _value_tokens(self, inputs: Sequence[dict], batch: dict) -> tuple[torch.Tensor, float | torch.Tensor]:
        """Return the values of the tokens of a generation batch, `(B, T)`, and lambda for [`generalized_advantages`].
        Entries added to `batch` are passed to `_train_critic`."""

    @abstractmethod
    def _train_critic(self, inputs: dict) -> None:
        """Back-propagate the critic loss of a micro-batch, and update the critic after the last one of a step."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        rewards = output["labels"]
        output["has_verdict"] = ~rewards.isnan()
        mask = self._value_mask(output)
        values, gae_lambda = self._value_tokens(inputs, output)
        advantages, returns = generalized_advantages(
            rewards.nan_to_num(0.0), values, mask, gamma=self.args.gamma, gae_lambda=gae_lambda
        )
        value_mean, _ = masked_mean_and_variance(values, mask, self._sum)
        return_mean, _ = masked_mean_and_variance(returns, mask, self._sum)
        self._log_values(
            explained_variance=explained_variance(values, returns, mask, self._sum).item(),
            value_mean=value_mean.item(),
            return_mean=return_mean.item(),
        )
        if self.args.whiten_advantages:
            advantages = whiten(advantages, mask, self._sum)
        mean_advantages = advantages.sum(dim=1) / mask.sum(dim=1).clamp(min=1)  # of completions
        self._log_advantages(self.accelerator.gather(mean_advantages).tolist())
        return output | {"values": values, "returns": returns, "advantages": advantages}

    def _value_mask(self, batch: dict) -> torch.Tensor:
        """Return which tokens have a value, bool `(B, T)`: those that the policy generated, of completions with a
        reward."""
        is_generated = batch["completion_mask"] * batch.get("tool_mask", 1)
        return is_generated.bool() & batch["has_verdict"].unsqueeze(1)

    def _sum(self, total: torch.Tensor) -> torch.Tensor:
        """Sum over processes."""
        return self.accelerator.reduce(total, reduction="sum")

    def _log_values(self, **metrics: float) -> None:
        """Log metrics under the name of the method, such as `ppo/value_mean`."""
        self.record_metrics({f"{self._name.lower()}/{name}": value for name, value in metrics.items()})

    def training_step(self, model, inputs, num_items_in_batch=None):
        # `_compute_loss` enters the context of packed attention here, because Trainer runs the backward pass, which
        # needs it too, after that has returned.
        with contextlib.ExitStack() as self._until_backward:
            return super().training_step(model, inputs, num_items_in_batch)

    def _compute_loss(self, model, inputs):
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        self._until_backward.enter_context(self.forward_pass.attention())
        self._train_critic(inputs)  # first, so that its activations are freed before the policy's pass
        loss = super()._compute_loss(model, inputs)
        log_ratio = self._last_logps - inputs.get("old_per_token_logps", self._last_logps)
        mask = self._value_mask(inputs)
        kl_terms = log_ratio.exp() - 1.0 - log_ratio  # Schulman's estimator k3
        self._add_to_step(approx_kl=kl_terms[mask].sum(), tokens=mask.sum())
        if self.accelerator.sync_gradients:
            self._log_step()
        return loss

    def _log_step(self) -> None:
        """Log the means over the tokens of an optimizer step on all processes, and forget its sums."""
        all_sums = self._sum(torch.stack([*self._step_sums.values()])).tolist()
        totals = dict(zip(self._step_sums, all_sums, strict=True))
        num_tokens = max(totals.pop("tokens"), 1)
        self._log_values(**{name: total / num_tokens for name, total in totals.items()})
        self._step_sums = {}

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        """Compute the parent's log-probs and entropies with a [`ForwardPass`], which packs completions."""
        forward_pass = self.ref_pass if model is self.ref_model else self.forward_pass
        prompt_width = input_ids.size(1) - logits_to_keep
        prompts = without_padding(input_ids[:, :prompt_width], attention_mask[:, :prompt_width])
        completions = without_padding(input_ids[:, prompt_width:], attention_mask[:, prompt_width:])
        size = batch_size or len(prompts)
        logps: list[torch.Tensor] = []
        entropies: list[torch.Tensor] = []
        # Passes with a gradient are a part of the update, not of `time/log_probs`.
        with contextlib.nullcontext() if torch.is_grad_enabled() else self.timer.part("log_probs"):
            for start in range(0, len(prompts), size):
                part = slice(start, start + size)
                outputs = forward_pass.compute_logps(model, prompts[part], completions[part])
                logps += outputs.logps
                entropies += outputs.entropies
        padded_logps = padded(logps, logits_to_keep)
        padded_entropies = None
        if entropies:
            padded_entropies = padded(entropies, logits_to_keep)
        self._last_logps = padded_logps.detach()
        return padded_logps, padded_entropies, None

    def _share_of_generation(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the divisor for a mean over the tokens of an optimizer step, from those of the generation batch."""
        share_of_step = self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return tokens.clamp(min=1.0) / self.accelerator.num_processes * share_of_step

    def _add_to_step(self, **totals: torch.Tensor) -> None:
        """Add sums over the tokens of a micro-batch to those of its optimizer step, see [`_log_step`]."""
        for name, total in totals.items():
            self._step_sums[name] = self._step_sums.get(name, 0.0) + total.float()

    def _get_grad_norm(self, model, grad_norm=None):
        grad_norm = super()._get_grad_norm(model, grad_norm)
        if self.state.global_step < self.args.critic_alone_steps:
            model.zero_grad(set_to_none=True)  # optimizers skip parameters without a gradient
        return grad_norm

    def _reset_run(self) -> None:
        super()._reset_run()
        self._step_sums = {}

    # The critic: its optimizer is of the type of the policy's, and its gradient is clipped to the same maximum norm.

    def _accumulating_critic(self, is_last: bool = True) -> contextlib.AbstractContextManager:
        """Return the context for the critic's forward and backward pass on a micro-batch or a part of it; `is_last`
        says whether it is the last part. Gradients are synchronized across processes only after the last one of an
        optimizer step."""
        if is_last and self.accelerator.sync_gradients:
            return contextlib.nullcontext()
        return self.accelerator.no_sync(self.critic)

    def _step_critic(self) -> float:
        """Update the critic, and return the norm of its gradient before clipping."""
        max_norm = self.args.max_grad_norm or math.inf
        self.accelerator.unscale_gradients()
        # accelerate's function compares the parameters with the policy's, which fails if both are sharded
        grad_norm = torch.nn.utils.clip_grad_norm_(self.critic.parameters(), max_norm)
        self._critic_optimizer.step()
        if not self.args.schedule_follows_metric:
            self._critic_scheduler.step()
        self._critic_optimizer.zero_grad()
        return float(grad_norm)

    def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler=False):
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        if self.args.schedule_follows_metric and not skip_scheduler:
            name = self.args.metric_for_best_model.removeprefix("eval_")
            self._critic_scheduler.step(metrics[f"eval_{name}"])
        return metrics

    @contextlib.contextmanager
    def _critic_in_place_of_policy(self) -> Iterator[None]:
        """Let `Trainer` save and load the critic as it does the policy, sharded or not."""
        policy = self.model, self.model_wrapped, self.optimizer, self.lr_scheduler
        self.model, self.model_wrapped = self.accelerator.unwrap_model(self.critic), self.critic
        self.optimizer, self.lr_scheduler = self._critic_optimizer, self._critic_scheduler
        try:
            yield
        finally:
            self.model, self.model_wrapped, self.optimizer, self.lr_scheduler = policy

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        directory = str(Path(output_dir) / "critic")
        with self._critic_in_place_of_policy():
            self.save_weights(directory, is_checkpoint=True)
            super()._save_optimizer_and_scheduler(directory)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            directory = str(Path(checkpoint) / "critic")
            with self._critic_in_place_of_policy():
                self._load_from_checkpoint(directory, self.model)
                super()._load_optimizer_and_scheduler(directory)


def padded(rows: list[torch.Tensor], length: int) -> torch.Tensor:
    """Pad `B` sequences on the right with 0 to `(B, length)`."""
    values = pad_sequence(rows, batch_first=True)
    return F.pad(values, (0, length - values.size(1)))


class PPOTrainer(ActorCriticTrainer):
    """
    Trainer for Proximal Policy Optimization with a token-level critic, the PPO baseline of the PACS paper.

    Rollouts are the same as in [`~trl.GRPOTrainer`], `num_generations` completions per prompt, but PPO does not
    compare rewards within a group. Logs the metrics of [`~trl.GRPOTrainer`] and `ppo/*`, see docs/metrics.md.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]): Model id, path, or instance.
        reward_funcs (`RewardFunc` or `list[RewardFunc]`): As in [`~trl.GRPOTrainer`]. A completion for which all of
            them return `None` is excluded from the loss.
        args ([`PPOConfig`], *optional*): Configuration of this trainer. If `None`, a default configuration is used.

    All other arguments are those of [`~trl.GRPOTrainer`].
    """

    args: PPOConfig
    _critic_has_values = True
    _name = "PPO"
    _config_class = PPOConfig
    _paper = {"title": "Proximal Policy Optimization Algorithms", "id": "1707.06347"}

    def _create_critic(self, policy, args, arguments) -> PreTrainedModel:
        """Load a critic with one output per token: a causal language model with a new value head, or a saved critic
        with the saved head."""
        set_seed(args.seed)  # for the initialization of the value head
        return load_critic(policy, args, architecture=AutoModelForTokenClassification, num_labels=1)

    @torch.no_grad()
    def _value_tokens(self, inputs, batch):
        """Compute the values in micro-batches of the size that training uses."""
        self.critic.eval()
        size = self.args.per_device_train_batch_size
        if not self.model.training:
            size = self.args.per_device_eval_batch_size
        with self.timer.part("log_probs"):
            values = self._values(batch, size)
        self.critic.train()
        return values, self.args.gae_lambda

    def _values(self, batch: dict, size: int) -> torch.Tensor:
        """Return the value of each token, `(B, T)`, read at the position before it, from `size` rows at a time."""
        prompts = without_padding(batch["prompt_ids"], batch["prompt_mask"])
        completions = without_padding(batch["completion_ids"], batch["completion_mask"])
        values: list[torch.Tensor] = []  # of each completion
        for start in range(0, len(prompts), size):
            part = slice(start, start + size)
            values += self._critic_pass.values(self.critic, prompts[part], completions[part])
        return padded(values, batch["completion_ids"].size(1))

    def _train_critic(self, inputs: dict) -> None:
        mask = self._value_mask(inputs)
        num_completions = len(inputs["completion_ids"])
        with self._accumulating_critic(), self._critic_pass.attention():
            values = self._values(inputs, num_completions)
            losses, is_clipped = clipped_value_losses(
                values, inputs["values"], inputs["returns"], self.args.value_clip_range
            )
            losses = losses.masked_fill(~mask, 0.0)
            # Divided as the policy's loss by the parent; losses are then averaged over processes.
            if self.loss_type == "dr_grpo":
                num_completions_of_step = num_completions * self.current_gradient_accumulation_steps
                denominator = num_completions_of_step * self.max_completion_length
            else:
                denominator = self._share_of_generation(inputs["num_items_in_batch"])
            self.accelerator.backward(losses.sum() / denominator)
        self._add_to_step(value_loss=losses.detach().sum(), value_clip_fraction=(is_clipped & mask).sum())
        if self.accelerator.sync_gradients:
            self._log_values(critic_grad_norm=self._step_critic())
