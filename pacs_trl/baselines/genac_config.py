"""Settings of GenAC besides those of any actor with a critic, and what is wrong with them."""

from dataclasses import dataclass
from typing import Any, Literal

from ..rollouts.step_sizes import Step
from ..rollouts.vllm_checks import server_url
from ..settings import settings_of, with_help
from .actor_critic_config import ActorCriticConfig
from .critic_prompt import CriticPrompt
from .critic_traces import read_traces


@with_help
@dataclass
class GenACConfig(ActorCriticConfig):
    r"""
    Configuration class for the [`GenACTrainer`]: that of [`ActorCriticConfig`], and what a critic that writes its
    values needs. Defaults are the paper's where it says them.

    Parameters:
        critic_learning_rate (`float`, *optional*, defaults to `1e-6`):
            Learning rate of the critic.
        critic_prompt (`str`, *optional*, defaults to `"genac"`):
            What the critic is asked: a template file, or `genac`, `genac_unconditioned`, `miniature` or
            `miniature_unconditioned`. The unconditioned ones leave out who acts, how often it is right and how far it
            is.
        critic_max_new_tokens (`int`, *optional*, defaults to `1024`):
            Tokens of an answer.
        critic_vllm_server_base_url (`str`, *optional*):
            Address of a vLLM server of the critic's own, beside the policy's (`vllm_mode: server`). Its weights go
            through the port behind `vllm_group_port`. Without it the policy's engine serves both in turn.
        critic_batch_size (`int`, *optional*):
            Answers of a forward pass, and of a call of `generate` without vLLM; by default
            `per_device_train_batch_size`.
        critic_lora_r (`int`, *optional*):
            Train an adapter of this rank on all linear layers of the critic, instead of the critic in full.
        segment_probability (`float`, *optional*, defaults to `0.2`):
            A token whose probability under the policy is below it ends a segment. `None` leaves the rule out.
        segment_length (`int`, *optional*, defaults to `512`):
            So does every so many-th token of a completion. `None` leaves the rule out.
        max_segments (`int`, *optional*, defaults to `16`):
            Segments of a completion; more are thinned out evenly. The critic is asked once for each.
        critic_budget (`int`, *optional*):
            Answers of a generation, on all processes, above which a run is refused.
        critic_extra_states (`bool`, *optional*, defaults to `True`):
            Whether the critic also learns from the state before the last token of each completion, and at the
            beginning from the mean reward of the prompt instead of each completion's own.
        critic_baseline (`str`, *optional*, defaults to `"outcome"`):
            What is subtracted from the reward of an answer: `"outcome"`, the mean reward of the other answers of the
            generation about completions with the same outcome, or `"none"`.
        critic_ratio_cap (`float`, *optional*, defaults to `2.0`):
            Upper bound of the importance weight between the critic that learns and what drew its answers.
        critic_pretraining_steps (`int`, *optional*, defaults to `100`):
            Optimizer steps at the start in which only the critic learns.
        critic_sft_dataset (`str`, *optional*):
            File of traces (`.jsonl`) that the critic is fine-tuned on before the first step: `problem`, `response`,
            `tokens_used`, `success_rate` and `answer` of each.
        critic_sft_epochs (`int`, *optional*, defaults to `1`):
            Passes over the traces.
        critic_sft_learning_rate (`float`, *optional*, defaults to `1e-5`):
            Learning rate of the supervised start, constant.
    """

    critic_learning_rate: float = 1e-6
    critic_prompt: str = "genac"
    critic_max_new_tokens: int = 1024
    critic_vllm_server_base_url: str | None = None
    critic_batch_size: int | None = None
    critic_lora_r: int | None = None
    segment_probability: float | None = 0.2
    segment_length: int | None = 512
    max_segments: int = 16
    critic_budget: int | None = None
    critic_extra_states: bool = True
    critic_baseline: Literal["outcome", "none"] = "outcome"
    critic_ratio_cap: float = 2.0
    critic_pretraining_steps: int = 100
    critic_sft_dataset: str | None = None
    critic_sft_epochs: int = 1
    critic_sft_learning_rate: float = 1e-5

    @property
    def critic_alone_steps(self) -> int:
        return self.critic_pretraining_steps

    @classmethod
    def errors(cls, given: Any, step: Step | None) -> list[str]:
        """What is wrong between settings, see [`~pacs_config.PACSConfig.errors`]."""
        errors, prompt = super().errors(given, step), None
        try:
            prompt = CriticPrompt.read(given.critic_prompt)
            if given.critic_sft_dataset is not None:
                read_traces(given.critic_sft_dataset, prompt)
        except ValueError as error:
            errors.append(str(error))
        for name in ("critic_sft_epochs", "critic_sft_learning_rate"):
            value, default = getattr(given, name), settings_of(cls)[name].default
            if given.critic_sft_dataset is None and value != default:
                errors.append(
                    f"{name}={value!r} would be ignored without critic_sft_dataset, the traces of a supervised start. "
                    "Name a file, or remove the key."
                )
        if given.max_completion_length is None:
            errors.append(
                "max_completion_length=None is not supported by GenAC: the critic is told of the limit, and its "
                "context must hold the longest response. Set a number."
            )
        own_server = given.critic_vllm_server_base_url
        if own_server is not None and not (given.use_vllm and given.vllm_mode == "server"):
            errors.append(
                f"critic_vllm_server_base_url={own_server!r} would be ignored without a server of the policy: set "
                "use_vllm: true and vllm_mode: server, or remove the key."
            )
        elif own_server is not None and own_server.rstrip("/") == server_url(given):
            errors.append(
                f"critic_vllm_server_base_url={own_server!r} is the policy's server, which serves both in turn "
                "without the key. Name another one, or remove the key."
            )
        most = most_answers(given, step)
        if most is not None and given.critic_budget is not None and most > given.critic_budget:
            per_row = most // step.rows_per_generation
            errors.append(
                f"critic_budget={given.critic_budget} is less than the {most} answers that a generation may ask of "
                f"the critic: {step.rows_per_generation} completions x {per_row} (max_segments={given.max_segments}"
                f"{', and the state before the last token' if given.critic_extra_states else ''}). Lower max_segments "
                "to "
                f"{max(1, given.critic_budget // step.rows_per_generation - given.critic_extra_states)} or less, or "
                "raise the budget."
            )
        return errors


def most_answers(given: Any, step: Step | None) -> int | None:
    """Answers that a generation may ask of the critic, on all processes; `None` where its size is not known."""
    return None if step is None else step.rows_per_generation * (given.max_segments + bool(given.critic_extra_states))
