"""TRL's vLLM engine with per-request seeds, coordinated failures, and timing.

- Every request has a seed. TRL seeds a colocated engine once, and its random state is not part of a checkpoint.
- If a server stops answering, all processes raise the same exception. TRL raises it on the main process only, while
  the others wait for completions forever.
- Equal prompts in one call to a server become one request for several completions.
- The time to send weights to vLLM is measured.
- A colocated engine gets all weights in one call, gathered one layer at a time (`engine_weights.py`). TRL makes a call
  per parameter, and adds and subtracts LoRA, which changes base weights in half precision.
- After each wake from sleep mode, log-probs of a fixed text are compared with the trainer's.
- With `vllm_sync_adapter` the engine keeps the base model, and loads each LoRA adapter from a directory under a new
  name, because its prefix cache is kept per name. An engine that loses the adapter would generate with the base model
  without an error, so log-probs of a fixed text are compared.
"""

import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from unittest.mock import patch

import torch
from accelerate.utils import broadcast_object_list, gather_object
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from ..errors import FailedRun
from ..update.forward_pass import ForwardPass
from ..update.peft_models import without_peft
from ..update.reference import reshard
from .adapter_checks import max_lora_rank
from .background import in_background
from .checkpoint import next_call_seed, next_seeds
from .engine_weights import (
    FIXED_TEXT,
    MAX_FIXED_TOKENS,
    LogpComparison,
    SharedIterator,
    WakeCheck,
    WrongWeights,
    merged_parameters,
    save_adapter,
    whole_adapter,
)
from .protocols import EngineTrainer
from .server_command import serve_command, server_url, training_dtype
from .sources import ConversationSource


if TYPE_CHECKING:
    from .resumable_trainer import ResumableTrainer


logger = logging.getLogger(__name__)

_PER_COMPLETION = ("completion_ids", "logprobs", "logprob_token_ids")  # in an answer of TRL's client
_adapter_numbers = itertools.count(1)  # an engine ignores an adapter that it has loaded under this number


class ServerFailure(RuntimeError):
    """Failure of a vLLM server, raised on all processes. `args` are its state, which completes the sentence "The vLLM
    server ...", and the cause: the server's response or the exception."""


class WorkerFailure(ServerFailure):
    """Failure of the rollout worker of `rollout_schedule: continuous` that is none of the server: of a reward function
    or a tool, for example."""


def raise_on_all(failure: tuple[str, str] | None) -> None:
    """Raise a [`ServerFailure`] with these arguments on all processes, which must call this, if the first process has
    a failure."""
    (failure,) = broadcast_object_list([failure], from_process=0)
    if failure is not None:
        raise ServerFailure(*failure)


class SeededLLM:
    """Proxy of vLLM's `LLM` whose `generate` sets the seed of each request that has none. `next_seeds(prompts)`
    returns the seeds of the next requests, and `record(completions)` receives their completions. What is awake is not
    woken again, which vLLM warns of; in sleep mode `llm` sleeps at first. All other attributes are those of `LLM`."""

    def __init__(
        self,
        llm,
        next_seeds: Callable[[list[list[int]]], list[int]],
        record: Callable[[list[list[int]]], None] = lambda completions: None,
    ):
        self.llm = llm
        self._next_seeds, self._record = next_seeds, record
        self._awake: set[str] = set()
        self.lora_request: Any = None  # of every request

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    def generate(self, prompts: list, sampling_params, **kwargs) -> list:
        """Generate completions of a list of prompts; other arguments and the result are those of
        `vllm.LLM.generate`."""
        if not isinstance(sampling_params, Sequence):
            sampling_params = [sampling_params] * len(prompts)
        params = [request_params.clone() for request_params in sampling_params]
        seedless = [i for i, request_params in enumerate(params) if request_params.seed is None]
        seeds = self._next_seeds([prompts[i]["prompt_token_ids"] for i in seedless])
        for i, seed in zip(seedless, seeds, strict=True):
            params[i].seed = seed
        if self.lora_request is not None:
            kwargs = {"lora_request": self.lora_request} | kwargs
        outputs = self.llm.generate(prompts, sampling_params=params, **kwargs)
        self._record([list(outputs[i].outputs[0].token_ids) for i in seedless])
        return outputs

    def wake_up(self, tags: list[str]) -> None:
        """Map the memory of weights or KV cache (`tags`) if it sleeps."""
        if asleep := [tag for tag in tags if tag not in self._awake]:
            self.llm.wake_up(tags=asleep)
            self._awake.update(asleep)

    def sleep(self, level: int) -> None:
        """Free the memory of weights and KV cache; level 2 drops the weights."""
        self._awake.clear()
        self.llm.sleep(level=level)

    def load_adapter(self, path: str) -> None:
        """Generate with the LoRA adapter in the directory `path` from now on."""
        from vllm.lora.request import LoRARequest

        number = next(_adapter_numbers)
        self.lora_request = LoRARequest(f"adapter-{number}", number, path)

    def prompt_logps(self, prompt_ids: list[int]) -> torch.Tensor:
        """Compute the log-probs of a prompt's tokens but the first, at temperature 1, float32 `(P - 1,)`."""
        params = vllm_generation.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        request = {"sampling_params": params, "use_tqdm": False, "lora_request": self.lora_request}
        (output,) = self.llm.generate([{"prompt_token_ids": prompt_ids}], **request)
        candidates_of_tokens = zip(prompt_ids[1:], output.prompt_logprobs[1:], strict=True)
        return torch.tensor([candidates[token].logprob for token, candidates in candidates_of_tokens])


class CountingClient:
    """Proxy of TRL's vLLM client that supports a different number of completions per prompt. The caller repeats each
    prompt once per completion. A server would return equal completions for equal prompts of a request with a seed, so
    prompts with the same count are sent as one request for `n` completions each, all requests concurrently."""

    def __init__(self, client):
        self.client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    @property
    def model(self) -> str:
        """Name of the model, or of the adapter, that requests ask for."""
        return self.client.model

    @model.setter
    def model(self, name: str) -> None:
        self.client.model = name

    def generate(self, prompts, features=None, n: int = 1, **kwargs) -> dict:
        """Generate completions; arguments and result are those of TRL's `VLLMClient.generate`."""
        indices: dict[tuple[int, ...], list[int]] = {}
        for i, ids in enumerate(prompts):
            indices.setdefault(tuple(ids), []).append(i)
        if n > 1 or features is not None or len(indices) == len(prompts):
            return self.client.generate(prompts=prompts, features=features, n=n, **kwargs)
        by_number: dict[int, list[list[int]]] = {}  # indices of each prompt, by their number
        for prompt_indices in indices.values():
            by_number.setdefault(len(prompt_indices), []).append(prompt_indices)
        merged: dict[str, list] = {name: [None] * len(prompts) for name in _PER_COMPLETION}

        def request(number: int) -> None:
            distinct_prompts = [prompts[prompt_indices[0]] for prompt_indices in by_number[number]]
            answer = self.client.generate(prompts=distinct_prompts, features=None, n=number, **kwargs)
            for name in _PER_COMPLETION:
                for i, row in zip(itertools.chain(*by_number[number]), answer[name], strict=True):
                    merged[name][i] = row

        for answer in [in_background(request, number) for number in by_number]:
            answer.result()
        return merged | {"prompt_ids": list(prompts)}

    def load_adapter(self, path: str) -> None:
        """Generate with the LoRA adapter in the directory `path` from now on."""
        name = f"{Path(path).name}-{next(_adapter_numbers)}"
        body = {"lora_name": name, "lora_path": path}
        response = self.client.session.post(f"{self.client.base_url}/v1/load_lora_adapter", json=body)
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}, {response.text:.300}")
        self.model = name

    def prompt_logps(self, prompt_ids: list[int]) -> torch.Tensor:
        """Compute the log-probs of a prompt's tokens but the first, at temperature 1, float32 `(P - 1,)`."""
        response = self.client.get_sequence_logprobs([prompt_ids], prompt_lengths=[1], top_logprobs=1)
        return torch.tensor(response["actual_logprobs"][0])[:, 0]


class Engine(VLLMGeneration):
    """Drop-in replacement for TRL's vLLM engine of a trainer. With `vllm_sync_adapter` it sends adapters."""

    adapter_sync: "AdapterSync | None" = None  # sends the adapter instead of merged weights
    wake_check: WakeCheck | None = None  # with sleep mode

    def __init__(self, trainer: EngineTrainer):
        vars(self).update(vars(trainer.vllm_generation))
        self._next_call_seed, self._timer = partial(next_call_seed, trainer), trainer.timer
        if self.mode == "colocate":
            self.llm = SeededLLM(
                self.llm,
                next_seeds=partial(next_seeds, trainer),
                record=lambda completions: trainer._request_seeds.record(completions),
            )
        elif self.accelerator.is_main_process:
            self.vllm_client = CountingClient(self.vllm_client)
        self._trainer = trainer
        ids = trainer._tokenizer(FIXED_TEXT)["input_ids"][:MAX_FIXED_TOKENS]
        if trainer.args.vllm_sync_adapter and trainer.args.rollout_schedule == "batch":
            parent = trainer.args.output_dir if self.mode == "server" else None  # by default not shared
            os.makedirs(parent or ".", exist_ok=True)
            self.adapter_sync = AdapterSync(self, trainer.create_forward_pass(trainer.model, 1.0), ids, parent)
        elif self.mode == "colocate" and self.enable_sleep_mode and trainer.args.startup_check:
            self.wake_check = WakeCheck(trainer.create_forward_pass(trainer.model, 1.0), ids)

    @contextmanager
    def using_weights_of(self, model, **sampling: Any) -> Iterator[None]:
        """Generate with the weights of another model of the same architecture inside the context, and with the
        sampling settings `sampling`. The weights of the engine's former model are sent again before the next
        generation."""
        before = {name: getattr(self, name) for name in ("model", "_weight_metadata", *sampling)}
        vars(self).update(sampling, model=model, _weight_metadata=None)
        try:
            self.sync_weights()
            yield
        finally:
            vars(self).update(before)

    def sync_weights(self) -> None:
        """Send the weights to vLLM. Raises a [`ServerFailure`] if a server does not answer. If a server dies during
        the transfer, NCCL may still hang waiting for its peer."""
        if self._trainer.args.rollout_schedule == "continuous":
            source = self._trainer._source
            assert isinstance(source, ConversationSource)
            source.send_weights()
            return
        with self._timer.part("weight_sync"):
            if self.mode == "server":
                health = self._ask_health()
                if health is not None:
                    raise ServerFailure("stopped answering", health)
            if self.adapter_sync is not None:
                self.adapter_sync.send()
            elif self.mode == "server":
                self._send_weights()
            else:
                self._load_weights()
            if self._trainer._reads_images:
                self._forget_images()

    def _send_weights(self) -> None:
        """Send all weights to the server as TRL does; a failure of the first process, which TRL raises there only, is
        raised on all."""
        failure = None
        try:
            super().sync_weights()
        except Exception as error:  # TRL's client raises bare exceptions
            if not self.accelerator.is_main_process:
                raise
            logger.exception("The vLLM server did not take the weights.")
            failure = "did not take the weights", f"{type(error).__name__}: {error}"
            for _ in self._weights:  # take part in the gathering of sharded weights
                pass
        raise_on_all(failure)

    def _forget_images(self) -> None:
        """Discard what vLLM keeps of images: outputs of their encoder with former weights."""
        if self.mode == "colocate":
            self.llm.llm_engine.reset_encoder_cache()
            return
        failure = None
        if self.accelerator.is_main_process:
            response = self.vllm_client.session.post(f"{self.vllm_client.base_url}/reset_encoder_cache")
            if response.status_code != 200:
                answer = f"POST /reset_encoder_cache has status {response.status_code}: set VLLM_SERVER_DEV_MODE=1"
                failure = "keeps images that the encoder has read with former weights", answer
        raise_on_all(failure)

    def _load_weights(self) -> None:
        """Send all weights to the colocated engine, and wake it in sleep mode."""
        if self.enable_sleep_mode:
            vllm_generation.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        worker = self.llm.llm_engine.model_executor.driver_worker
        worker.model_runner.model.load_weights(self._iter_named_params())
        self.llm.reset_prefix_cache()
        if self.wake_check is not None and self.model is self._trainer.model and self._is_shared_turn():
            self.accelerator.wait_for_everyone()  # NCCL of tensor parallelism may race with that of training
            self.llm.wake_up(tags=["kv_cache"])
            self.wake_check.run(self.llm, self.model)

    def _is_shared_turn(self) -> bool:
        """Return whether all processes generate now; with tools, only those that called one have another turn."""
        trainer = self._trainer
        has_turns = bool(trainer.tools or trainer.environment_factories)
        return not has_turns or trainer.state.global_step != trainer._last_loaded_step

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the weights under vLLM's names, see [`merged_parameters`]."""
        self._weights = SharedIterator(self._whole_weights())
        return self._weights

    def _whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self.model
        reshard(model)  # after forward passes some parameters are gathered copies, which TRL does not expect
        is_tuner = isinstance(model, PeftModel) and isinstance(model.base_model, BaseTuner)
        if not is_tuner or self._dist.fsdp_version == 1 or getattr(without_peft(model), "is_quantized", False):
            yield from super()._iter_named_params()
            return
        weights = merged_parameters(without_peft(model), self.accelerator.device, self._dist.gather_params)
        for name, weight in weights:
            yield self._fix_param_name_to_vllm(name), weight

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """Generate completions; arguments and result are those of TRL's engine. Raises a [`ServerFailure`] if a server
        fails or returns fewer completions than requested."""
        if self.mode == "colocate":
            return self._generate_colocated(prompts, images, num_generations, profiler)
        generation_kwargs, cause = self.generation_kwargs, None
        if "seed" not in generation_kwargs:  # one per call: vLLM adds the completion index to it
            self.generation_kwargs = {**generation_kwargs, "seed": self._next_call_seed()}
        try:
            generated = super().generate(prompts, images, num_generations, profiler)
        except Exception as error:  # TRL's client raises bare exceptions
            if not self.accelerator.is_main_process:
                raise
            logger.exception("The vLLM server failed to generate.")
            cause = f"{type(error).__name__}: {error}"
            generated = ([], [], [], [])
            broadcast_object_list([generated], from_process=0)  # the others wait for this in TRL's `generate`
        finally:
            self.generation_kwargs = generation_kwargs
        if len(generated[1]) < len(prompts):
            health = self._ask_health()
            state = "is healthy, but did not generate" if health is None else "stopped answering"
            raise ServerFailure(state, cause or health or "it returned too few completions")
        return generated

    def _generate_colocated(self, prompts, images, num_generations, profiler) -> tuple:
        """Generate with the engine of this process, which expands the placeholders of images itself. Raises a
        [`FailedRun`] if it reads other tokens than the trainer."""
        if images is None:
            return super().generate(prompts, images, num_generations, profiler)
        unexpanded = self._trainer._unexpanded_prompt_ids
        read_prompts = [unexpanded.get(tuple(ids), ids) for ids in prompts]
        generated = super().generate(read_prompts, images, num_generations, profiler)
        for ids, ids_of_engine in zip(prompts, generated[0], strict=True):
            if list(ids) != list(ids_of_engine):
                raise FailedRun(
                    f"vLLM reads a prompt with images as {len(ids_of_engine)} tokens, the trainer as {len(ids)}. "
                    "Generate with transformers (use_vllm: false), or try another version of vLLM."
                )
        return generated

    def _ask_health(self) -> str | None:
        """Return why the server is unhealthy, or `None` if it is healthy; the result is the same on all processes.
        Retries as TRL's client does."""
        problems: list[str | None] = [None]
        if self.accelerator.is_main_process:
            try:
                status = self.vllm_client.session.get(f"{self.vllm_client.base_url}/health").status_code
                problems = [None if status == 200 else f"GET /health has status {status}"]
            except OSError as error:  # base class of the exceptions of requests
                problems = [f"{type(error).__name__}: {error}"]
        broadcast_object_list(problems, from_process=0)
        return problems[0]


@contextmanager
def engine_with_lora(args: Any, model: Any, peft_config: Any) -> Iterator[None]:
    """With `vllm_sync_adapter`, enable LoRA in the engine that TRL constructs inside, or do without the NCCL group of
    its client, which sends all weights; also with `rollout_schedule: continuous`. TRL has no settings for either."""
    rank = max_lora_rank(args, model, peft_config)
    if rank is None and (args.rollout_schedule == "batch" or not args.use_vllm):
        yield
        return
    replacement: AbstractContextManager[Any]
    if args.vllm_mode == "colocate":
        engine_class = partial(vllm_generation.LLM, enable_lora=True, max_loras=1, max_lora_rank=rank)
        replacement = patch.object(vllm_generation, "LLM", engine_class)
    else:
        replacement = patch.object(vllm_generation.VLLMClient, "init_communicator", lambda client, device: None)
    with replacement:
        yield


class AdapterSync(LogpComparison):
    """Send the adapter of an [`Engine`]'s model to vLLM, through a directory in `parent`, which a server can read. The
    log-probs of `prompt_ids` are compared with those of `forward_pass`, at temperature 1."""

    def __init__(self, engine: Any, forward_pass: ForwardPass, prompt_ids: list[int], parent: str | None):
        super().__init__(forward_pass, prompt_ids)
        self.engine = engine
        self.directory = tempfile.TemporaryDirectory(prefix="vllm_adapter_", dir=parent)

    def send(self) -> None:
        """Send the adapter. Raises [`WrongWeights`] on all processes if an engine rejects it or does not use it."""
        engine, problem = self.engine, None
        try:
            if engine.mode == "colocate" or engine.accelerator.is_main_process:
                problem = self._send(engine.llm if engine.mode == "colocate" else engine.vllm_client)
        except Exception as error:  # TRL's client raises bare exceptions, and other processes wait
            logger.exception("vLLM did not answer with the adapter.")
            problem = f"did not answer with the trained adapter ({error})"
        if problems := [text for text in gather_object([problem]) if text]:
            raise WrongWeights(
                f"vLLM {problems[0]}. Fix the problem, or remove vllm_sync_adapter to send all weights, and continue "
                "with `--resume_from_checkpoint last`."
            )

    def _send(self, target: Any) -> str | None:
        model, directory = self.engine.model, Path(self.directory.name).resolve()
        if not self.seen:  # of the base model
            with model.disable_adapter():
                self.seen = [(target.prompt_logps(self.prompt_ids), self.trainer_logps(model))] * 2
        save_adapter(whole_adapter(model, self.forward_pass.device), model, directory)
        target.load_adapter(str(directory))
        difference = self.difference(model, target.prompt_logps(self.prompt_ids), self.trainer_logps(model))
        if difference is None:
            return None
        return (
            f"does not generate with the trained adapter: its log-probs of a fixed text differ from the trainer's by "
            f"{difference[0]:.2g} nats per token, and without the adapter by {difference[1]:.2g} (the base model is "
            "loaded by name, without revision or changes made in Python)"
        )


def stop_without_engine(trainer: "ResumableTrainer", failure: ServerFailure | WrongWeights) -> NoReturn:
    """Save the state after the last optimizer step, and raise a [`FailedRun`], on all processes: the vLLM server, or
    the engine process of a run without vLLM, has failed, or generates with other weights."""
    trainer.undo_step_and_save()
    if isinstance(failure, WrongWeights):
        raise FailedRun(str(failure)) from failure
    state, cause = failure.args
    args, step = trainer.args, trainer.state.global_step
    if isinstance(failure, WorkerFailure):
        engine, remedy = "rollout worker", ""
    elif trainer.use_vllm:
        name = trainer.model.name_or_path or "MODEL"
        rank = max_lora_rank(args, trainer.model, None)
        dtype = training_dtype(args, trainer.model)
        command = serve_command(name, rank, args, dtype, trainer._longest_sequence)
        engine, remedy = f"vLLM server at {server_url(args)}", f", start the server if it is down: {command}"
    else:
        engine, remedy = "engine process", " (an error above, or memory)"
    saved = "No optimizer step had been taken yet"
    if step > 0:
        saved = f"The state after it is in {args.output_dir}/checkpoint-{step}"
    raise FailedRun(
        f"The {engine} {state} after optimizer step {step} ({cause}). "
        f"{saved}; fix the problem{remedy} and continue with "
        "`--resume_from_checkpoint last`."
    ) from failure
