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

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
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
from .engine_failures import ServerFailure, raise_on_all
from .engine_proxies import CountingClient, SeededLLM
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
from .random_numbers import next_call_seed, next_seeds
from .sources import ConversationSource


logger = logging.getLogger(__name__)


class Engine(VLLMGeneration):
    """Drop-in replacement for TRL's vLLM engine of a trainer. With `vllm_sync_adapter` it sends adapters."""

    adapter_sync: "AdapterSync | None" = None  # sends the adapter instead of merged weights
    wake_check: WakeCheck | None = None  # with sleep mode

    def __init__(self, trainer: EngineTrainer):
        vars(self).update(vars(trainer.vllm_generation))  # TRL's engine, which has started or connected
        self._trainer = trainer
        self._timer = trainer.timer
        self._next_call_seed = partial(next_call_seed, trainer)
        if self.mode == "colocate":
            self.llm = SeededLLM(
                self.llm,
                next_seeds=partial(next_seeds, trainer),
                record=lambda completions: trainer._request_seeds.record(completions),
            )
        elif self.accelerator.is_main_process:
            self.vllm_client = CountingClient(self.vllm_client)
        args = trainer.args
        sends_adapters = args.vllm_sync_adapter and args.rollout_schedule == "batch"
        checks_after_wake = self.mode == "colocate" and self.enable_sleep_mode and args.startup_check
        if not sends_adapters and not checks_after_wake:
            return
        fixed_ids = trainer._tokenizer(FIXED_TEXT)["input_ids"][:MAX_FIXED_TOKENS]
        forward_pass = trainer.create_forward_pass(trainer.model, 1.0)
        if sends_adapters:
            parent = args.output_dir if self.mode == "server" else None  # by default not shared
            os.makedirs(parent or ".", exist_ok=True)
            self.adapter_sync = AdapterSync(self, forward_pass, fixed_ids, parent)
        else:
            self.wake_check = WakeCheck(forward_pass, fixed_ids)

    @contextmanager
    def using_weights_of(self, model, **sampling: Any) -> Iterator[None]:
        """Generate with the weights of another model of the same architecture inside the context, and with the
        sampling settings `sampling`. The weights of the engine's former model are sent again before the next
        generation."""
        former = {name: getattr(self, name) for name in ("model", "_weight_metadata", *sampling)}
        vars(self).update(sampling, model=model, _weight_metadata=None)
        try:
            self.sync_weights()
            yield
        finally:
            vars(self).update(former)

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
                illness = self._why_unhealthy()
                if illness is not None:
                    raise ServerFailure("stopped answering", illness)
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
            failure = ("did not take the weights", f"{type(error).__name__}: {error}")
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
                failure = (
                    "keeps images that the encoder has read with former weights",
                    f"POST /reset_encoder_cache has status {response.status_code}: set VLLM_SERVER_DEV_MODE=1",
                )
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
        has_adapter = isinstance(model, PeftModel) and isinstance(model.base_model, BaseTuner)
        if not has_adapter or self._dist.fsdp_version == 1 or getattr(without_peft(model), "is_quantized", False):
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
        generation_kwargs = self.generation_kwargs
        if "seed" not in generation_kwargs:  # one per call: vLLM adds the completion index to it
            self.generation_kwargs = {**generation_kwargs, "seed": self._next_call_seed()}
        error_of_client = None
        try:
            generated = super().generate(prompts, images, num_generations, profiler)
        except Exception as error:  # TRL's client raises bare exceptions
            if not self.accelerator.is_main_process:
                raise
            logger.exception("The vLLM server failed to generate.")
            error_of_client = f"{type(error).__name__}: {error}"
            generated = ([], [], [], [])
            broadcast_object_list([generated], from_process=0)  # the others wait for this in TRL's `generate`
        finally:
            self.generation_kwargs = generation_kwargs
        completions = generated[1]
        if len(completions) < len(prompts):
            illness = self._why_unhealthy()
            state = "is healthy, but did not generate" if illness is None else "stopped answering"
            raise ServerFailure(state, error_of_client or illness or "it returned too few completions")
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

    def _why_unhealthy(self) -> str | None:
        """Return why the server is unhealthy, or `None` if it is healthy; the result is the same on all processes.
        Retries as TRL's client does."""
        reason = None
        if self.accelerator.is_main_process:
            try:
                status = self.vllm_client.session.get(f"{self.vllm_client.base_url}/health").status_code
                if status != 200:
                    reason = f"GET /health has status {status}"
            except OSError as error:  # base class of the exceptions of requests
                reason = f"{type(error).__name__}: {error}"
        (reason,) = broadcast_object_list([reason], from_process=0)
        return reason


@contextmanager
def engine_with_lora(args: Any, model: Any, peft_config: Any) -> Iterator[None]:
    """
    Change the engine, or the client of a server, that TRL constructs inside the context. TRL has no settings for it.

    With `vllm_sync_adapter` a colocated engine can load LoRA adapters. A client has no NCCL group, which sends all
    weights, with `vllm_sync_adapter` and with `rollout_schedule: continuous`.
    """
    rank = max_lora_rank(args, model, peft_config)  # `None` without `vllm_sync_adapter`
    is_continuous = args.use_vllm and args.rollout_schedule == "continuous"
    if rank is None and not is_continuous:
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
            if engine.mode == "colocate":
                problem = self._send(engine.llm)
            elif engine.accelerator.is_main_process:
                problem = self._send(engine.vllm_client)
        except Exception as error:  # TRL's client raises bare exceptions, and other processes wait
            logger.exception("vLLM did not answer with the adapter.")
            problem = f"did not answer with the trained adapter ({error})"
        problems = [text for text in gather_object([problem]) if text is not None]
        if problems:
            raise WrongWeights(
                f"vLLM {problems[0]}. Fix the problem, or remove vllm_sync_adapter to send all weights, and continue "
                "with `--resume_from_checkpoint last`."
            )

    def _send(self, proxy: SeededLLM | CountingClient) -> str | None:
        """Send the adapter through a proxy of the engine, and return what is wrong with the log-probs of the engine;
        `None` if nothing is."""
        model, directory = self.engine.model, Path(self.directory.name).resolve()
        if not self.seen:  # the first comparison, without the adapter
            with model.disable_adapter():
                self.seen = [(proxy.prompt_logps(self.prompt_ids), self.trainer_logps(model))] * 2
        save_adapter(whole_adapter(model, self.forward_pass.device), model, directory)
        proxy.load_adapter(str(directory))
        difference = self.difference(model, proxy.prompt_logps(self.prompt_ids), self.trainer_logps(model))
        if difference is None:
            return None
        with_adapter, without_adapter = difference
        return (
            f"does not generate with the trained adapter: its log-probs of a fixed text differ from the trainer's by "
            f"{with_adapter:.2g} nats per token, and without the adapter by {without_adapter:.2g} (the base model is "
            "loaded by name, without revision or changes made in Python)"
        )
