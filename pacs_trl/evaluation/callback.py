"""pass@k during training (figure 3 of the paper), without touching the training run.

The completions come from the trainer's own generation engine, with the sampling settings of the evaluation and a seed for
every request, and every random state is put back afterwards: a run with the callback has the weights of a run without it,
bit for bit. Values go to the trainer's log as `eval_<benchmark>/pass@<k>`, from where the report draws the curves.
Works with any subclass of TRL's GRPOTrainer. It keeps no samples: use `pacs-trl evaluate` for numbers to publish.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import Trainer, TrainerCallback
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from ..data import PROMPT_INSTRUCTION, build_prompt
from ..rollouts.rollout_trainer import RolloutTrainer
from ..verification import shared_verifier
from .benchmarks import LoadedBenchmark
from .engines import TransformersEngine
from .grading import BackgroundGrader
from .requests import Completion, Request, SamplingSettings, render_prompt, sample_seed
from .results import summarize


class EvaluationCallback(TrainerCallback):
    """
    Evaluate every `every_steps` optimizer steps, before the first one and after the last one.

    Args:
        trainer ([`~trl.GRPOTrainer`] or a subclass): The trainer this callback is added to.
        benchmarks (sequence of [`~pacs_trl.evaluation.benchmarks.LoadedBenchmark`]): From `load_benchmark`.
        every_steps (`int`): Optimizer steps between evaluations.
        n (`int`): Samples per problem; the paper's training-time evaluation is greedy (`n=1`, temperature 0).
        ks (sequence of `int`): Values of k, each at most `n`.
        settings ([`SamplingSettings`], *optional*): Sampling; the trainer's own completion length is not used.
        seed (`int`): Seed of the samples, the same at every evaluation, so that a curve moves only when the model does.
        batch_size (`int`): Rows per call of `generate` (transformers only).
        prompt_instruction, system_prompt: As in training, see `build_prompt`.

    Grading is that of training: the shared verifier of the process.

    Raises:
        `ValueError`: if `every_steps` is below 1 or a k lies outside [1, n].
    """

    def __init__(
        self,
        trainer: Any,
        benchmarks: Sequence[LoadedBenchmark],
        *,
        every_steps: int,
        n: int = 1,
        ks: Sequence[int] = (1,),
        settings: SamplingSettings | None = None,
        seed: int = 0,
        batch_size: int = 64,
        prompt_instruction: str = PROMPT_INSTRUCTION,
        system_prompt: str | None = None,
    ):
        if every_steps < 1:
            raise ValueError(f"every_steps counts optimizer steps and must be at least 1, got {every_steps}.")
        if not ks or min(ks) < 1 or max(ks) > n:
            raise ValueError(f"pass@k needs 1 <= k <= n, got k = {list(ks)} with n = {n} samples.")
        self.trainer, self.benchmarks = trainer, list(benchmarks)
        self.every_steps, self.n, self.ks, self.seed = every_steps, n, list(ks), seed
        self.settings = settings or SamplingSettings()
        self.batch_size = batch_size
        self.prompt_instruction, self.system_prompt = prompt_instruction, system_prompt
        self._evaluated_step: int | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._evaluate(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every_steps == 0:
            self._evaluate(state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        self._evaluate(state.global_step)

    def _evaluate(self, step: int) -> None:
        if step == self._evaluated_step:
            return
        self._evaluated_step = step
        with preserved_random_states():
            logs: dict[str, float] = {}
            for benchmark in self.benchmarks:
                drawn = self._draw(benchmark)
                if self.trainer.accelerator.is_main_process:
                    logs |= self._score(benchmark, drawn)
        # Not `self.trainer.log`: GRPOTrainer's version would empty the training metrics gathered so far. And writing a log
        # takes back the request for one, which the trainer may just have made for this step.
        should_log = self.trainer.control.should_log
        Trainer.log(self.trainer, logs)
        self.trainer.control.should_log = should_log

    def _draw(self, benchmark: LoadedBenchmark) -> dict[tuple[str, int], Completion]:
        """All completions of a benchmark on every rank. Each rank draws a share of the problems, wrapped around so that
        all ranks make the same number of collective calls."""
        accelerator = self.trainer.accelerator
        rank, world_size = accelerator.process_index, accelerator.num_processes
        problems = benchmark.problems
        share = -(-len(problems) // world_size)
        mine = [problems[(rank * share + i) % len(problems)] for i in range(share)]
        prompts = {
            p.id: build_prompt(p.problem, instruction=self.prompt_instruction, system_prompt=self.system_prompt)
            for p in mine
        }
        requests = [
            Request(p.id, j, sample_seed(self.seed, f"{benchmark.name}/{p.id}", j), prompts[p.id])
            for p in mine
            for j in range(self.n)
        ]
        drawn = self._draw_vllm(benchmark, requests) if self.trainer.use_vllm else self._draw_transformers(requests)
        return dict(gather_object(drawn))

    def _draw_transformers(self, requests: Sequence[Request]) -> list[tuple[tuple[str, int], Completion]]:
        trainer = self.trainer
        with (
            unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
            ) as model,
            trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
        ):
            engine = TransformersEngine(
                model, trainer._tokenizer, batch_size=self.batch_size, chat_template_kwargs=self._template_kwargs()
            )
            return [
                ((r.problem_id, r.sample), completion) for r, completion in engine.generate(requests, self.settings)
            ]

    def _draw_vllm(
        self, benchmark: LoadedBenchmark, requests: Sequence[Request]
    ) -> list[tuple[tuple[str, int], Completion]]:
        """
        Through the trainer's vLLM (colocated or server), which also brings it the current weights.

        Its interface takes one seed per call, so sample j of all problems is one call. With a seed on every request vLLM
        draws nothing from its global generator, which training uses. `_generate_single_turn` of PACSTrainer and PPOTrainer
        counts requests of training, and these are none.
        """
        trainer, tokenizer = self.trainer, self.trainer._tokenizer
        generate = (
            trainer._generate_or_stop
            if isinstance(trainer, RolloutTrainer)
            else partial(GRPOTrainer._generate_single_turn, trainer)
        )
        drawn = []
        for sample in range(self.n):
            batch = [request for request in requests if request.sample == sample]
            texts = [render_prompt(tokenizer, request.prompt, self._template_kwargs()) for request in batch]
            prompt_ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
            with self._vllm_settings(sample_seed(self.seed, benchmark.name, sample)):
                completion_ids, _ = generate(prompt_ids, None, {}, 1)
            for request, tokens in zip(batch, completion_ids, strict=True):
                cut = len(tokens) == self.settings.max_new_tokens and tokens[-1] not in trainer.eos_token_ids
                text = tokenizer.decode(tokens, skip_special_tokens=True)
                drawn.append(
                    ((request.problem_id, request.sample), Completion(text, len(tokens), "length" if cut else "stop"))
                )
        return drawn

    @contextmanager
    def _vllm_settings(self, seed: int) -> Iterator[None]:
        """The evaluation's sampling settings for the length of one call.

        PACSTrainer puts a `generate` of its own on a colocated engine, which takes the next seeds of training: it is set
        aside, or the training run would draw other completions than without evaluation.
        """
        generation = self.trainer.vllm_generation
        seeded = vars(generation.llm).pop("generate", None) if self.trainer.vllm_mode == "colocate" else None
        changed = {
            "temperature": self.settings.temperature,
            "top_p": self.settings.top_p,
            "top_k": self.settings.top_k,
            "min_p": None,
            "repetition_penalty": 1.0,
            "max_completion_length": self.settings.max_new_tokens,
            "generation_kwargs": {"seed": seed},
        }
        saved = {name: getattr(generation, name) for name in changed}
        try:
            for name, value in changed.items():
                setattr(generation, name, value)
            yield
        finally:
            for name, value in saved.items():
                setattr(generation, name, value)
            if seeded is not None:
                generation.llm.generate = seeded

    def _template_kwargs(self) -> dict[str, Any]:
        return {"chat_template": self.trainer.chat_template, **self.trainer.chat_template_kwargs}

    def _score(self, benchmark: LoadedBenchmark, drawn: dict[tuple[str, int], Completion]) -> dict[str, float]:
        with BackgroundGrader(shared_verifier(), {p.id: p.solution for p in benchmark.problems}) as grader:
            for (problem, sample), completion in drawn.items():
                grader.add(
                    {
                        "problem": problem,
                        "sample": sample,
                        "completion": completion.text,
                        "num_tokens": completion.num_tokens,
                        "finish_reason": completion.finish_reason,
                    }
                )
            graded = grader.finish()
        summary = summarize([p.id for p in benchmark.problems], graded.values(), self.ks)
        name = f"eval_{benchmark.name}"
        logs = {f"{name}/pass@{k}": cell["value"] for k, cell in summary["pass_at_k"].items()}
        return logs | {
            f"{name}/mean_tokens": summary["mean_tokens"],
            f"{name}/truncated_share": summary["truncated_share"],
        }


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Put back the states of Python's, numpy's and torch's generators (CPU and every CUDA device) at the end."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
