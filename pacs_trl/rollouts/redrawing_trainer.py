"""Rollouts of which some prompts are drawn again before anything is learnt: guided attempts, adaptive rollouts, refill."""

from collections import defaultdict, deque
from collections.abc import Callable

from accelerate.utils import gather_object
from peft import PeftConfig
from transformers import BitsAndBytesConfig, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from trl.trainer.grpo_trainer import RewardFunc, RolloutFunc

from ..update.rows import Rollout, unpad_rollouts
from .adaptive import extend_hard_groups
from .guidance import HintFunction, check_guidance, guide_failed_groups
from .redraw import Redraw
from .refill import refill_uniform_groups
from .rollout_trainer import Config, Environments, EvalData, Model, Optimizers, RolloutTrainer, TrainData
from .step_sizes import Step


class RedrawingTrainer(RolloutTrainer[Config]):
    """[`RolloutTrainer`] whose configuration has [`DrawSettings`]; `hint` is described in [`PACSTrainer`]."""

    _own_shared_settings = (
        *("adaptive_rollouts", "max_generations", "adaptive_rollouts_budget", "guidance", "max_guided_fraction"),
        *("guided_completions", "guided_weight", "refill_uniform_groups", "max_refill_rounds"),
    )

    def __init__(
        self,
        model: Model,
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: Config | None = None,
        train_dataset: TrainData | None = None,
        eval_dataset: EvalData | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        tools: list[Callable] | None = None,
        rollout_func: RolloutFunc | None = None,
        environment_factory: Environments | None = None,
        *,
        hint: HintFunction | None = None,
    ):
        self._hint = hint
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            optimizers,
            quantization_config,
            peft_config,
            tools,
            rollout_func,
            environment_factory,
        )

    def _prepare_drawing(self) -> None:
        super()._prepare_drawing()
        if self.args.draws_again:
            self.draw_name = "first"
            self._widen_tables()

    def _prepare_loading(self, model, args, arguments) -> None:
        super()._prepare_loading(model, args, arguments)
        tools, environments = arguments.get("tools"), arguments.get("environment_factory")
        dataset = arguments.get("train_dataset")
        check_guidance(args.guidance, self._hint, dataset, tools=tools, environments=environments)
        if args.refill_uniform_groups and not hasattr(dataset, "__len__"):
            raise ValueError(
                "refill_uniform_groups=True draws prompts from the whole training set, which must know its length; a "
                f"{type(dataset).__name__} does not. Load it into memory (streaming=False), or remove the key."
            )

    def _widen_tables(self) -> None:
        """Tables of completions, which TRL bounds by a generation, have room for all draws of one."""
        step = Step.of(self.args, self.accelerator.num_processes)
        most = step.rows_per_generation + self.args.most_additional(step)
        for name, kept in self._logs.items():
            wide: deque | defaultdict = deque(maxlen=most)
            self._logs[name] = wide if isinstance(kept, deque) else defaultdict(lambda: deque(maxlen=most))

    def _draw_generation(self, generation_batch) -> list[Rollout]:
        """This process's rows for the optimizer steps until the next generation."""
        if self.args.draws_again:  # else the last table would fill up this one
            for kept in self._logs.values():
                kept.clear()
        return unpad_rollouts(self._generate_and_score_completions(generation_batch))

    def _draw_rows(self, generation_batch, num_steps: int) -> list[Rollout]:
        """The rows of all processes, for `num_steps` optimizer steps."""
        rollouts = self._draw_generation(generation_batch)
        if not self.args.draws_again:
            return gather_object(rollouts)
        return self._draw_again(generation_batch, rollouts, num_steps)

    def _draw_again(self, generation_batch, rollouts: list[Rollout], num_steps: int) -> list[Rollout]:
        """The rows of all processes, after guided attempts, more completions of hard prompts and other prompts."""
        again, args = Redraw(self, generation_batch, rollouts), self.args
        if args.guidance is not None:
            learns_from_all = args.guided_completions == "all"
            guide_failed_groups(again, args.guidance, self._hint, args.max_guided_fraction, num_steps, learns_from_all)
        if args.adaptive_rollouts is not None:
            extend_hard_groups(
                again,
                schedule=args.adaptive_rollouts,
                max_generations=args.max_generations,
                budget=args.adaptive_rollouts_budget,
            )
        if args.refill_uniform_groups:
            refill_uniform_groups(again, args.max_refill_rounds)
        return again.rollouts
