"""PPOTrainer: TRL's GRPOTrainer with a critic.

Generation, rewards, the clipped policy loss, KL term and logging are the parent's, so PPO and GRPO differ in the
advantage only: here each token has its own, from a critic with a value head. What is added:

- `_generate_and_score_completions` lets the critic judge the rollouts and replaces the advantages.
- `_compute_loss` lets the critic learn from a micro-batch before the policy does.
- All forward passes are those of a [`Scorer`], over rows without padding.
- A checkpoint holds the critic and its optimizer.

The critic is a model of its own, next to the policy (`second_model.py`).
"""

import contextlib
import logging
import re
import textwrap

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForTokenClassification, PreTrainedModel, set_seed
from trl.trainer.utils import create_model_from_path, disable_dropout_in_model, get_config_model_id

from ..rollouts.rollout_trainer import RolloutTrainer
from ..update.rows import without_padding
from .gae import clipped_value_losses, explained_variance, generalized_advantages, masked_mean_and_variance, whiten
from .ppo_config import PPOConfig
from .second_model import SecondModel


def load_critic(policy: str | PreTrainedModel, args: PPOConfig) -> PreTrainedModel:
    """
    The critic of a policy or of its path, one output per token: `critic_model_name_or_path`, or the policy's weights
    under a new value head. `model_init_kwargs` apply to it too, except the dtype, which is float32, and the revision,
    if it has a path of its own.

    Raises:
        `ValueError`: if the policy was built in memory and no path for the critic is given.
    """
    kwargs = {**(args.model_init_kwargs or {}), "dtype": "float32", "device_map": None, "num_labels": 1}
    kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    path = args.critic_model_name_or_path
    if path is not None:
        kwargs.pop("revision", None)
    else:
        path = policy if isinstance(policy, str) else get_config_model_id(policy.config)
    if not isinstance(policy, str):
        kwargs.setdefault("attn_implementation", policy.config._attn_implementation)
    if not path:
        raise ValueError(
            "The critic starts from the policy's weights, but the policy was built in memory and has no path. Save it "
            "and pass the directory as `model`, or set critic_model_name_or_path."
        )
    set_seed(args.seed)  # of the value head
    loading = logging.getLogger("transformers.modeling_utils")
    loading.addFilter(_is_news)
    try:
        critic = create_model_from_path(path, architecture=AutoModelForTokenClassification, **kwargs)
    finally:
        loading.removeFilter(_is_news)
    if args.disable_dropout:
        disable_dropout_in_model(critic)
    if args.gradient_checkpointing:
        critic.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)
    return critic.train()


def _is_news(record: logging.LogRecord) -> bool:
    """Unlike a report that a critic made of a policy has a new head, as it should."""
    keys = re.findall(r"^(\S+) +\|", record.getMessage(), flags=re.MULTILINE)
    return not keys or not all(key.startswith(("Key", "score.", "lm_head.")) for key in keys)


class PPOTrainer(RolloutTrainer[PPOConfig]):
    """
    Trainer for Proximal Policy Optimization with a token-level critic, the PPO baseline of the PACS paper.

    The rollouts are those of [`~trl.GRPOTrainer`]: `num_generations` completions per prompt, whose rewards PPO uses
    one by one. Logs the metrics of [`~trl.GRPOTrainer`] and `ppo/*`, see docs/metrics.md.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]): Model id, path, or instance.
        reward_funcs (`RewardFunc` or `list[RewardFunc]`): As in [`~trl.GRPOTrainer`]. A completion for which all of
            them return `None` is left out.
        args ([`PPOConfig`], *optional*): Configuration of this trainer. If `None`, a default configuration is used.

    All other arguments are those of [`~trl.GRPOTrainer`].
    """

    _own_shared_settings = (
        "gamma",
        "gae_lambda",
        "whiten_advantages",
        "value_clip_range",
        "epsilon",
        "epsilon_high",
        "delta",
        "loss_type",
        "critic_learning_rate",
        "critic_warmup_steps",
        "world_size",
    )
    _tag_names = ["trl", "ppo"]
    _name = "PPO"
    _config_class = PPOConfig
    _paper = {
        "title": "Proximal Policy Optimization Algorithms",
        "id": "1707.06347",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{schulman2017proximal,
                title        = {{Proximal Policy Optimization Algorithms}},
                author       = {John Schulman and Filip Wolski and Prafulla Dhariwal and Alec Radford and Oleg Klimov},
                year         = 2017,
                eprint       = {arXiv:1707.06347},
            }"""),
    }

    def _prepare_learning(self) -> None:
        if self.is_fsdp_enabled and not self.accelerator.is_fsdp2:
            raise ValueError(
                "PPOTrainer supports FSDP2 only, this is FSDP 1. Set `fsdp_version: 2` in the accelerate file."
            )
        if self._is_vlm:
            raise ValueError(
                f"PPOTrainer supports text models only, got {type(self.model).__name__}: the critic sees no images."
            )
        self._critic_scorer = self._create_scorer(self.critic)
        rate = self.args.critic_learning_rate
        self._second_model = SecondModel(self, self.critic, learning_rate=rate, directory="critic")
        self.critic = self._second_model.model

    def _prepare_loading(self, model, args, arguments):
        if args.deepspeed_plugin is not None:
            raise ValueError(
                "PPOTrainer does not support DeepSpeed, which trains one model per process. Use DDP or FSDP2 "
                "(recipes/accelerate_configs)."
            )
        super()._prepare_loading(model, args, arguments)
        self.critic = load_critic(model, args)  # before the policy, which seeds again: rollouts are those of GRPO

    def create_scheduler(self, num_training_steps, optimizer=None):
        self._second_model.create_scheduler(num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    # Rollouts -----------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        rewards = output["labels"]
        output["has_verdict"] = ~rewards.isnan()
        mask = self._value_mask(output)
        values = self._judge(output)
        advantages, returns = generalized_advantages(
            rewards.nan_to_num(0.0), values, mask, gamma=self.args.gamma, gae_lambda=self.args.gae_lambda
        )
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["ppo/explained_variance"].append(explained_variance(values, returns, mask, self._sum).item())
        metrics["ppo/value_mean"].append(masked_mean_and_variance(values, mask, self._sum)[0].item())
        metrics["ppo/return_mean"].append(masked_mean_and_variance(returns, mask, self._sum)[0].item())
        if self.args.whiten_advantages:
            advantages = whiten(advantages, mask, self._sum)
        self._log_advantages(advantages, mask)
        return output | {"values": values, "returns": returns, "advantages": advantages}

    @torch.no_grad()
    def _judge(self, batch: dict) -> torch.Tensor:
        """Values of all tokens of a generation batch, in micro-batches of the size that the update uses."""
        self.critic.eval()
        size = self.args.per_device_train_batch_size if self.model.training else self.args.per_device_eval_batch_size
        names = ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask")
        chunks = zip(*(batch[name].split(size) for name in names), strict=True)
        with self.timer.part("log_probs"):
            values = [self._values(dict(zip(names, chunk, strict=True))) for chunk in chunks]
        self.critic.train()
        return torch.cat(values)

    def _values(self, batch: dict) -> torch.Tensor:
        """`(B, T)`: the value of a token is read where the token is predicted, one position before its own."""
        prompts = without_padding(batch["prompt_ids"], batch["prompt_mask"])
        completions = without_padding(batch["completion_ids"], batch["completion_mask"])
        values = self._critic_scorer.values(self.critic, prompts, completions)
        return _padded(values, batch["completion_ids"].size(1))

    def _value_mask(self, batch: dict) -> torch.Tensor:
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        return mask.bool() & batch["has_verdict"].unsqueeze(1)

    def _sum(self, total: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(total, reduction="sum")

    def _log_advantages(self, advantages: torch.Tensor, mask: torch.Tensor) -> None:
        """The table of completions shows the mean over each completion instead of the parent's group advantage."""
        means = self.accelerator.gather(advantages.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).tolist()
        logged = self._logs["advantages"]
        for _ in range(min(len(means), len(logged))):
            logged.pop()
        logged.extend(means)

    # Optimizer step -----------------------------------------------------------------------------------------------

    def training_step(self, model, inputs, num_items_in_batch=None):
        with contextlib.ExitStack() as self._until_backward:
            return super().training_step(model, inputs, num_items_in_batch)

    def _compute_loss(self, model, inputs):
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        self._until_backward.enter_context(self.scorer.attention())
        self._learn_values(inputs)  # first, so that its activations are gone when the policy needs the memory
        loss = super()._compute_loss(model, inputs)
        log_ratio = self._last_logps - inputs.get("old_per_token_logps", self._last_logps)
        self._step_sums[2] += (log_ratio.exp() - 1.0 - log_ratio)[self._value_mask(inputs)].sum()
        if self.accelerator.sync_gradients:
            self._log_step()
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        batch_size=None,
        compute_entropy=False,
        compute_aux_loss=False,
        **kwargs,
    ):
        """As the parent's, but over rows without padding."""
        scorer = self.ref_scorer if model is self.ref_model else self.scorer
        width = input_ids.size(1) - logits_to_keep
        prompts = without_padding(input_ids[:, :width], attention_mask[:, :width])
        completions = without_padding(input_ids[:, width:], attention_mask[:, width:])
        size, router = batch_size or len(prompts), {"output_router_logits": True} if compute_aux_loss else {}
        with contextlib.nullcontext() if torch.is_grad_enabled() else self.timer.part("log_probs"):
            passes = [
                scorer.forward(model, prompts[i : i + size], completions[i : i + size], fused_lm_head=True, **router)
                for i in range(0, len(prompts), size)
            ]

        def of_rows(name: str) -> torch.Tensor:
            return _padded([row for outputs, of in passes for row in of(outputs[name])], logits_to_keep)

        logps = of_rows("log_probs")
        self._last_logps = logps.detach()
        aux_loss = torch.stack([outputs.aux_loss for outputs, _ in passes]).mean() if compute_aux_loss else None
        return logps, of_rows("entropy") if compute_entropy else None, aux_loss

    def _learn_values(self, inputs: dict) -> None:
        mask = self._value_mask(inputs)
        with self._second_model.accumulating(), self._critic_scorer.attention():
            losses, clipped = clipped_value_losses(
                self._values(inputs), inputs["values"], inputs["returns"], self.args.value_clip_range
            )
            losses = losses.masked_fill(~mask, 0.0)
            self.accelerator.backward(losses.sum() / self._loss_denominator(inputs))
        self._step_sums[0] += losses.detach().sum()
        self._step_sums[1] += (clipped & mask).sum()
        self._step_sums[3] += mask.sum()
        if self.accelerator.sync_gradients:
            self._metrics["train"]["ppo/critic_grad_norm"].append(self._second_model.step())

    def _loss_denominator(self, inputs: dict) -> torch.Tensor | float:
        """What the parent divides the policy's summed token losses by; processes are averaged afterwards."""
        accumulation_steps = self.current_gradient_accumulation_steps
        if self.loss_type == "dr_grpo":
            return len(inputs["completion_ids"]) * self.max_completion_length * accumulation_steps
        share_of_generation = accumulation_steps / self.args.steps_per_generation
        return inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes * share_of_generation

    def _log_step(self) -> None:
        value_loss, clipped, kl, tokens = self._sum(self._step_sums).tolist()
        self._step_sums.zero_()
        metrics = {"value_loss": value_loss, "value_clip_fraction": clipped, "approx_kl": kl}
        for name, total in metrics.items():
            self._metrics["train"][f"ppo/{name}"].append(total / max(tokens, 1))

    def _get_grad_norm(self, model, grad_norm=None):
        grad_norm = super()._get_grad_norm(model, grad_norm)
        if self.state.global_step < self.args.critic_warmup_steps:
            model.zero_grad(set_to_none=True)  # optimizers leave parameters without a gradient alone
        return grad_norm

    # Checkpoints --------------------------------------------------------------------------------------------------

    def _reset_run(self) -> None:
        super()._reset_run()
        self._last_logps: torch.Tensor | None = None
        # over the tokens of an optimizer step: value losses, clipped values, approximate KL, number of tokens
        self._step_sums = torch.zeros(4, device=self.accelerator.device)

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        self._second_model.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._second_model.load(checkpoint)


def _padded(rows: list[torch.Tensor], length: int) -> torch.Tensor:
    """`(B, length)`, 0 behind the end of a row."""
    values = pad_sequence(rows, batch_first=True)
    return F.pad(values, (0, length - values.size(1)))
