"""Connection of a run with continuous rollouts to its vLLM server, which gets the weights of each optimizer step."""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from trl.experimental.async_grpo.vllm_client import VLLMClient
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

from .engine_failures import raise_on_all
from .engine_weights import FIXED_TEXT, MAX_FIXED_TOKENS, LogpComparison, WrongWeights, save_adapter, whole_adapter
from .protocols import ContinuousTrainer
from .rollout_worker import RolloutWorker
from .server_adapters import ServerAdapters
from .server_checks import server_config, shares_memory
from .server_command import server_url
from .server_watch import Failure, ServerWatch, failure_of
from .weight_transfer import SharedMemoryTransfer


_SECONDS_TO_DRAIN = 60.0


class ServerConnection:
    """
    The weights that a server has, the way they get there, and the watch of the server.

    All processes have one, since they gather sharded weights together; only the first process talks to the server,
    and connects when it sends weights for the first time.

    Attributes:
        sent_step (`int`): Number of optimizer steps before the weights of the server; -1 before the first transfer.
        watch ([`ServerWatch`], *optional*): On the first process, once it is connected.
        num_slots (`int`): Number of completions that the server decodes at the same time; known with `watch`.
    """

    def __init__(self, trainer: ContinuousTrainer):
        self.trainer = trainer
        self.is_main = trainer.accelerator.is_main_process
        self.sent_step = -1
        self.watch: ServerWatch | None = None
        self.num_slots = 0
        self._client = VLLMClient(server_url(trainer.args))
        self._transfer: Any = None
        self._adapters: ServerAdapters | None = None  # with `vllm_sync_adapter`, instead of a transfer
        self._served_model = ""  # name of the base model, with adapters
        self._comparison: LogpComparison | None = None

    def send_weights(self, worker: RolloutWorker | None) -> None:
        """Send the current weights to the server, unless it has them, and compare log-probs of a fixed text. All
        processes must call this. `worker` is the one whose completions the server generates, if it has started, on
        the first process. Raises a [`ServerFailure`] if the server does not answer, and [`WrongWeights`] if it does
        not compute with these."""
        trainer, step = self.trainer, self.trainer.state.global_step
        if self.sent_step == step:
            return
        with trainer.timer.part("weight_sync"):
            if self.sent_step < 0:
                self._connect()
            if trainer.args.vllm_sync_adapter:
                failure = self._send_adapter(step, worker)
            else:
                failure = self._send_all(step, worker)
            raise_on_all(failure)
            self.sent_step = step
            if trainer.args.startup_check:
                self._compare_logps()

    def close(self) -> None:
        """End the connection, and leave the server running. Sending weights connects again."""
        if self.watch is not None:
            self.watch.close()
        if self._transfer is not None:
            with contextlib.suppress(Exception):
                self._transfer.destroy()
        if self._adapters is not None:
            self._adapters.close()
        self.watch = self._transfer = self._comparison = None
        self.sent_step = -1

    @property
    def lora_name(self) -> str | None:
        """On the first process, the name of adapters without their version; `None` if all weights are sent."""
        return None if self._adapters is None else self._adapters.name

    def _connect(self) -> None:
        """Choose how weights reach the server, and create its watch, which starts with the worker: after an evaluation
        alone a server may end. All processes must call this."""
        trainer = self.trainer
        failure, uses_nccl = None, False
        if self.is_main:
            try:
                config = server_config(self._client.server_url)
                self.num_slots = config["scheduler_config"]["max_num_seqs"]
                sends_all = not trainer.args.vllm_sync_adapter
                uses_nccl = sends_all and not shares_memory(config, self._client.server_url)
            except Exception as error:
                failure = failure_of("did not answer", error)
        raise_on_all(failure)
        (uses_nccl,) = broadcast_object_list([uses_nccl], from_process=0)
        info = self._weight_info() if uses_nccl else None
        if self.is_main:
            try:
                self._create_transfer(info)
                self.watch = ServerWatch(self._client.server_url)
            except Exception as error:
                failure = failure_of("did not connect", error)
        raise_on_all(failure)
        if trainer.args.vllm_sync_adapter and trainer.args.startup_check:
            model: Any = trainer.vllm_generation.model
            with model.disable_adapter():
                self._compare_logps()  # of the base model, which the server has before it loads an adapter

    def _create_transfer(self, info: dict[str, list] | None) -> None:
        """Create what sends weights: by NCCL, which announces them with `info`, adapters alone, or shared memory."""
        args, client = self.trainer.args, self.trainer.vllm_generation.vllm_client
        if args.vllm_sync_adapter:
            self._served_model = client.model = self._served_model or client.model
            os.makedirs(args.output_dir, exist_ok=True)
            self._adapters = ServerAdapters(self._client, args.output_dir)
            self._client.resume()  # a run that was killed may have left the server paused
            return
        if info is None:
            self._transfer = SharedMemoryTransfer(self._client)
        else:
            self._transfer = WeightTransferClient(self._client, info)
        self._transfer.init_weight_transfer()

    def _weight_info(self) -> dict[str, list]:
        """Return names, dtypes, and shapes of the weights, which a transfer by NCCL announces. All processes must call
        this; sharded weights are gathered, one at a time."""
        info: dict[str, list] = {"names": [], "dtype_names": [], "shapes": []}
        for name, weight in self.trainer.vllm_generation._iter_named_params():
            info["names"].append(name)
            info["dtype_names"].append(str(weight.dtype).removeprefix("torch."))
            info["shapes"].append(list(weight.shape))
        return info

    def _send_all(self, step: int, worker: RolloutWorker | None) -> Failure | None:
        weights = self.trainer.vllm_generation._iter_named_params()
        failure = self._replace_weights(weights, step, worker) if self.is_main else None
        for _ in weights:  # take part in the gathering of sharded weights, also after a failure
            pass
        return failure

    def _replace_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], step: int, worker: RolloutWorker | None
    ) -> Failure | None:
        assert self.watch is not None
        transfer = self._transfer
        if (failure := self.watch.check()) is not None:  # new weights would hide that the server was restarted
            return failure
        is_staged = isinstance(transfer, SharedMemoryTransfer)
        try:
            if is_staged:
                transfer.stage(weights)
            with self.watch.replacing(step) as version:
                started = time.perf_counter()
                transfer.pause()
                if is_staged:
                    transfer.load()
                else:
                    transfer.send_weights(weights)
                if worker is not None:
                    _drain(worker)
                    worker.shared.value = step
                self._name_weights(version)
                transfer.resume()
                self.trainer.record_metrics({"async/pause_seconds": time.perf_counter() - started})
        except Exception as error:
            # A paused server stays so: with a part of the new weights it must not generate. The next run resumes it.
            return failure_of("did not take the weights", error)
        return self.watch.check()

    def _send_adapter(self, step: int, worker: RolloutWorker | None) -> Failure | None:
        engine = self.trainer.vllm_generation
        model: Any = engine.model
        weights = whole_adapter(model, self.trainer.accelerator.device, engine._dist.gather_params)
        if not self.is_main:
            return None
        assert self.watch is not None and self._adapters is not None
        if (failure := self.watch.check()) is not None:
            return failure
        try:
            save_adapter(weights, model, self._adapters.folder_of(step))
            with self.watch.replacing(step) as version:
                self._adapters.load(step)
                self._name_weights(version)
            engine.vllm_client.model = self._adapters.name_of(step)
            if worker is not None:
                if worker.shared.drained == worker.shared.asked:  # `oldest` is that after the last adapter
                    self._adapters.unload_before(worker.shared.oldest)
                worker.shared.value = step
                worker.shared.asked += 1
        except Exception as error:
            return failure_of("did not load the adapter", error)
        return self.watch.check()

    def _name_weights(self, version: str) -> None:
        assert self.watch is not None
        body = {"new_version": version}
        self.watch.client.post("/update_weight_version", json=body, timeout=60).raise_for_status()

    def _compare_logps(self) -> None:
        trainer = self.trainer
        if self._comparison is None:
            ids = trainer._tokenizer(FIXED_TEXT)["input_ids"][:MAX_FIXED_TOKENS]
            self._comparison = LogpComparison(trainer.create_forward_pass(trainer.model, 1.0), ids)
        comparison, model = self._comparison, trainer.vllm_generation.model
        trainer_logps = comparison.trainer_logps(model)
        result: list[Any] = [None, None]  # failure, difference
        if self.is_main:
            try:
                engine_logps = trainer.vllm_generation.vllm_client.prompt_logps(comparison.prompt_ids)
                comparison.seen = comparison.seen or [(engine_logps, trainer_logps)] * 2
                result[1] = comparison.difference(model, engine_logps, trainer_logps)
            except Exception as error:
                result[0] = failure_of("failed to compute log-probs", error)
        failure, difference = broadcast_object_list(result, from_process=0)
        raise_on_all(failure)
        if difference is not None:
            off, mismatch = difference
            what, first = "weights", "after the first transfer"
            if trainer.args.vllm_sync_adapter:
                what, first = "adapter", "without the adapter"
            raise WrongWeights(
                f"The vLLM server does not generate with the trained {what}: its log-probs of a fixed text differ "
                f"from the trainer's by {off:.2g} nats per token, and {first} by {mismatch:.2g}. "
                "Start the server with the precision and quantization of training (dtype), and continue with "
                "`--resume_from_checkpoint last` (startup_check: false trains without this comparison)."
            )


def _drain(worker: RolloutWorker) -> None:
    """Wait until a worker has read what the server had sent before its pause."""
    shared = worker.shared
    shared.asked += 1
    deadline = time.monotonic() + _SECONDS_TO_DRAIN
    while shared.drained != shared.asked and not worker.has_failed:
        if time.monotonic() > deadline:
            raise TimeoutError("the rollout worker is busy")
        time.sleep(0.002)
