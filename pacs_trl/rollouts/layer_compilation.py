"""Compilation of the decoder layers of a run: whether it is possible; it happens before the first generation."""

import logging
import time
from typing import Any, NamedTuple

from accelerate.utils import gather_object
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from ..errors import UserError
from ..update.compiled_layers import CompiledLayers, missing_compiler
from ..update.startup_check import compile_layers
from .model_config import config_of
from .protocols import CompilingTrainer
from .quantization_checks import quantization_method
from .rollout_config import RolloutConfig
from .router_checks import trains_routers


logger = logging.getLogger(__name__)


class Obstacle(NamedTuple):
    """Why decoder layers cannot be compiled, and what to do instead, as parts of a sentence."""

    reason: str
    remedy: str


def obstacle_to_compilation(
    args: RolloutConfig, *, is_zero3: bool, quantization: str | None, trains_routers: bool = False
) -> Obstacle | None:
    """Return what in the settings prevents `compile_layers`, if anything; `quantization` is the method, and
    `trains_routers` says whether the loss has that of the routers of a mixture of experts."""
    if args.torch_compile:
        return Obstacle("torch_compile: true compiles the whole model", "Remove torch_compile")
    if is_zero3:
        return Obstacle("ZeRO-3 gathers weights inside the layers", "Use FSDP2 or ZeRO-2")
    if quantization is not None:
        reason = f"the model is quantized with {quantization}, which computes with kernels of its own"
        return Obstacle(reason, "Load it without quantization")
    if trains_routers:
        reason = "the loss of the routers (router_aux_loss_coef) reads what the layers compute inside"
        return Obstacle(reason, "Set router_aux_loss_coef: 0.0")
    return None


def refusal_of_compilation(obstacle: Obstacle) -> str:
    """Return the error message for `compile_layers: true`."""
    return f"compile_layers: true is not possible: {obstacle.reason}. {obstacle.remedy}, or set compile_layers: false."


def compiles_layers(
    model: str | PreTrainedModel | PeftModel, args: RolloutConfig, quantization_config: Any = None
) -> bool:
    """Return whether decoder layers are to be compiled. Raise a `ValueError` if that is asked for and not possible;
    log a warning if it is the default and not possible."""
    if args.compile_layers is False or (args.compile_layers == "auto" and args.device.type != "cuda"):
        return False
    config = quantization_config or getattr(config_of(model, args), "quantization_config", None)
    obstacle = obstacle_to_compilation(
        args,
        is_zero3=is_deepspeed_zero3_enabled(),
        quantization=quantization_method(config),
        trains_routers=trains_routers(config_of(model, args), args),
    )
    if obstacle is None and (missing := missing_compiler(args.device)) is not None:
        obstacle = Obstacle(f"this machine lacks {missing}", "Install it")
    if obstacle is None:
        return True
    if args.compile_layers is True:
        raise UserError(refusal_of_compilation(obstacle))
    warn_of_eager_layers(args, obstacle.reason)
    return False


def warn_of_eager_layers(args: RolloutConfig, reason: str) -> None:
    """Log why `compile_layers: auto` does not compile, on the first process."""
    if args.process_index == 0:
        logger.warning(
            f"Decoder layers are not compiled (compile_layers: auto), so updates are slower: {reason}. Set "
            "compile_layers: false to hide this warning."
        )


def compile_policy_and_reference(trainer: CompilingTrainer) -> None:
    """Compile the decoder layers of the policy, and with the same graphs those of the reference of the KL term. If one
    process cannot, none does: warn, or raise a `ValueError` with `compile_layers: true`. All processes must call this.
    """
    args, accelerator = trainer.args, trainer.accelerator
    accelerator.print("Compiling the decoder layers (compile_layers).", flush=True)
    started = time.perf_counter()
    check, training = args.startup_check, args.disable_dropout
    reason = compile_layers(trainer.forward_pass, trainer.model_wrapped, training=training, check=check)
    reasons = [text for text in gather_object([reason]) if text is not None]
    if reasons:
        trainer.forward_pass.compiled_layers = None
        if args.compile_layers is True:
            raise UserError(
                f"compile_layers: true is not possible with this model: {reasons[0]}. Set compile_layers: false."
            )
        warn_of_eager_layers(args, reasons[0])
        return
    if check:
        accelerator.print(f"Compiled them in {time.perf_counter() - started:.0f} s.", flush=True)
    if trainer.ref_model is not None:
        trainer.ref_pass.compiled_layers = CompiledLayers(trainer.ref_pass.model)
