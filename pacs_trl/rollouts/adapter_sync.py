"""LoRA adapters sent to vLLM instead of merged weights, and a check that vLLM generates with them.

The engine keeps the base model, and loads each adapter from a directory under a new name, because its prefix cache is
kept per name. An engine that loses the adapter would generate with the base model without an error.
"""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME
from trl.generation import vllm_generation

from ..errors import FailedRun
from ..update.forward_pass import ForwardPass
from ..update.startup_check import HALF_PRECISION_TOLERANCE, own_outputs, tolerance_of, undisturbed
from .checks import max_lora_rank


logger = logging.getLogger(__name__)


@contextmanager
def engine_with_lora(args: Any, model: Any, peft_config: Any) -> Iterator[None]:
    """With `vllm_sync_adapter`, enable LoRA in the engine that TRL constructs inside, or do without the NCCL group of
    its client, which sends all weights. TRL has no settings for either."""
    if (rank := max_lora_rank(args, model, peft_config)) is None:
        yield
        return
    owner, name, value = vllm_generation.VLLMClient, "init_communicator", lambda client, device: None
    if args.vllm_mode == "colocate":
        owner, name = vllm_generation, "LLM"
        value = partial(vllm_generation.LLM, enable_lora=True, max_loras=1, max_lora_rank=rank)
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class AdapterSync:
    """Send the adapter of an [`Engine`]'s model to vLLM, through a directory in `parent`, which a server can read. The
    log-probs of `prompt_ids` are compared with those of `forward_pass`, at temperature 1."""

    def __init__(self, engine: Any, forward_pass: ForwardPass, prompt_ids: list[int], parent: str | None):
        self.engine, self.forward_pass, self.prompt_ids = engine, forward_pass, prompt_ids
        self.directory = tempfile.TemporaryDirectory(prefix="vllm_adapter_", dir=parent)
        # Log-probs of engine and trainer: of the base model, and when the engine's last changed.
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def send(self) -> None:
        """Send the adapter. Raises a [`FailedRun`] on all processes if an engine rejects it or does not use it."""
        engine, problem = self.engine, None
        try:
            if engine.mode == "colocate" or engine.accelerator.is_main_process:
                problem = self._send(engine.llm if engine.mode == "colocate" else engine.vllm_client)
        except Exception as error:  # TRL's client raises bare exceptions, and other processes wait
            logger.exception("vLLM did not answer with the adapter.")
            problem = f"did not answer with the trained adapter ({error})"
        if problems := [found for found in gather_object([problem]) if found]:
            raise FailedRun(
                f"vLLM {problems[0]}. Fix the problem, or remove vllm_sync_adapter to send all weights, and continue "
                "with `--resume_from_checkpoint last`."
            )

    def _send(self, target: Any) -> str | None:
        model, directory = self.engine.model, Path(self.directory.name).resolve()
        if not self.seen:
            with model.disable_adapter():
                self.seen = [(target.prompt_logps(self.prompt_ids), self._own_logps())] * 2
        weights = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
        save_file({name: w.contiguous() for name, w in weights.items()}, directory / ADAPTER_SAFE_WEIGHTS_NAME)
        model.active_peft_config.save_pretrained(str(directory))
        target.load_adapter(str(directory))
        return self._problem(target.prompt_logps(self.prompt_ids), self._own_logps())

    def _own_logps(self) -> torch.Tensor:
        model, ids = self.engine.model, self.prompt_ids
        with undisturbed(model, self.forward_pass.device):
            model.eval()
            return own_outputs(self.forward_pass, model, ids[:1], ids[1:], values=False).cpu()

    def _problem(self, found: torch.Tensor, own: torch.Tensor) -> str | None:
        """Return why the engine's log-probs `found` cannot come from the adapter, whose log-probs are `own`. Rounding
        is measured on the base model; a lost or outdated adapter repeats earlier log-probs bit by bit."""
        (base_found, base_own), (last_found, _) = self.seen
        mismatch, effect, off = _distance(base_found, base_own), _distance(own, base_own), _distance(found, own)
        noise = max(4 * mismatch, tolerance_of(self.forward_pass, self.engine.model) / 4)
        repeats = any(torch.equal(found, before) and _distance(own, then) > noise for before, then in self.seen)
        if not torch.equal(found, last_found):
            self.seen[1] = found, own
        if mismatch <= HALF_PRECISION_TOLERANCE and off <= noise * (1 + effect) and not repeats:
            return None
        return (
            f"does not generate with the trained adapter: its log-probs of a fixed text differ from the trainer's by "
            f"{off:.2g} nats per token, and without the adapter by {mismatch:.2g} (the base model is loaded by name, "
            "without revision or changes made in Python)"
        )


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().mean().item()
