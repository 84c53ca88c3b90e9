"""Compilation of the decoder layers of a run, before its first generation."""

import time

from accelerate.utils import gather_object

from ..errors import UserError
from ..update.compiled_layers import CompiledLayers
from ..update.startup_check import compile_layers
from .model_checks import warn_of_eager_layers
from .protocols import CompilingTrainer


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
