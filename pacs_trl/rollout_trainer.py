"""What PACSTrainer and PPOTrainer add to the rollouts of TRL's GRPOTrainer, whatever is learnt from them.

- Every process shuffles by seed and epoch, and every request to vLLM has a seed, so a resumed run draws what the first would
  have drawn.
- When a vLLM server dies, all processes save the state after the last optimizer step together and stop.
- Completions that a colocated engine has finished are graded while it draws the others.
"""

from pathlib import Path

from peft import LoraConfig, PeftConfig
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import get_config_model_id

from .early_grading import EarlyGrading
from .lora import check_lora_targets
from .resume import EpochSampler, request_seed
from .rewards import math_reward
from .vllm_checks import check_vllm, serve_command, server_url
from .vllm_requests import ServerGuard, seed_requests


class RolloutTrainer(GRPOTrainer):
    """[`~trl.GRPOTrainer`] whose rollouts can be drawn again."""

    def __init__(self, model, reward_funcs=None, args=None, **kwargs):
        super().__init__(model, reward_funcs, args=args, **kwargs)
        self._num_requests = 0  # sent to vLLM by this process
        self._at_step_begin = (-1, 0)  # micro-step and requests where the running optimizer step began
        self._early_grading: EarlyGrading | None = None
        self._solutions: list = []  # of the rows that are being generated
        if self.use_vllm:
            self._seed_requests()
            self._grade_early()

    @staticmethod
    def _check_before_loading(model: str | PreTrainedModel, args: GRPOConfig, peft_config: PeftConfig | None) -> None:
        """
        Raises:
            `ValueError`: if the vLLM that `args` asks for cannot work, or the model has not the modules that LoRA is for.
        """
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

    def _seed_requests(self) -> None:
        engine = self.vllm_generation
        if "seed" in engine.generation_kwargs:
            raise ValueError(
                f"generation_kwargs={{'seed': {engine.generation_kwargs['seed']}}} would draw the same completion for "
                f"every row of a group. Remove it: {type(self).__name__} derives a seed for each request from `seed`."
            )
        if self.vllm_mode == "server":
            # one seed per call, see `_generate_single_turn`; vLLM adds the index of the completion to it
            self._server = ServerGuard(engine, self.accelerator)
        else:
            seed_requests(engine, self._next_seeds)

    def _next_seeds(self, num_requests: int) -> list[int]:
        # Processes that share one engine by tensor parallelism must agree on the seeds; a server has one stream.
        processes_per_engine = self.args.vllm_tensor_parallel_size
        stream = 0 if self.vllm_mode == "server" else self.accelerator.process_index // processes_per_engine
        first = self._num_requests
        self._num_requests += num_requests
        return [request_seed(self.args.seed, stream, first + i) for i in range(num_requests)]

    def _grade_early(self) -> None:
        """Where completions come one by one, and `math_reward` grades the text that their tokens spell."""
        parsed = any(
            getattr(self._tokenizer, name, None) is not None for name in ("response_template", "response_schema")
        )
        if self.vllm_mode == "colocate" and math_reward in self.reward_funcs and not self.tools and not parsed:
            self._early_grading = EarlyGrading(
                self.vllm_generation, lambda ids: self._tokenizer.batch_decode(ids, skip_special_tokens=True)
            )

    def _get_train_sampler(self, dataset=None):
        return EpochSampler(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))

    def _generate_and_score_completions(self, inputs):
        self._solutions = [row.get("solution") for row in inputs]
        return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        step_begin = self._step - self._step % self.args.gradient_accumulation_steps
        if self.model.training and self._at_step_begin[0] != step_begin:
            self._at_step_begin = (step_begin, self._num_requests)
        served = self.use_vllm and self.vllm_mode == "server"
        if served:
            self.vllm_generation.generation_kwargs["seed"] = self._next_seeds(len(prompt_ids))[0]
            if not self._server.answers():
                self._stop_without_server()
        if self._early_grading is not None:
            self._early_grading.expect(prompt_ids, self._solutions)
        completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if served and len(completion_ids) < len(prompt_ids):
            self._stop_without_server()
        return completion_ids, logprobs

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        if self._early_grading is not None:
            self._early_grading.wait()
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _rewind_step(self) -> None:
        """Back to where the optimizer step began that cannot be finished: what was drawn for it is drawn again."""
        self._step, self._num_requests = self._at_step_begin

    def _stop_without_server(self) -> None:
        """Save the state between the last two optimizer steps, on all processes, and raise."""
        if self.model.training:
            self._rewind_step()
        directory = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if self.state.global_step > 0 and not directory.is_dir():
            self._save_checkpoint(self.model, trial=None)
        kept = f"The state after it is in {directory}" if directory.is_dir() else "Nothing had been learnt yet"
        raise RuntimeError(
            f"The vLLM server at {server_url(self.args)} stopped answering after optimizer step "
            f"{self.state.global_step} ({self._server.failure}). {kept}. Start the server again with: "
            f"{serve_command(self.model.name_or_path)} and continue with `--resume_from_checkpoint last`."
        )
