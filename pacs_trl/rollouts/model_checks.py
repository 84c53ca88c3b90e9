"""Checks of the model that a trainer receives, most of them before anything is loaded: what is trained and by which
optimizer, and whether other processes and engines get the same model."""

import inspect
import logging
import warnings
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from ..errors import UserError
from ..update.compiled_layers import missing_compiler
from ..update.peft_models import without_peft
from .checks import config_of
from .memory import uses_plugin
from .rollout_config import RolloutConfig


logger = logging.getLogger(__name__)

_MOST_NAMED = 3  # changes of a model that an error names


def check_model(model: str | PreTrainedModel | PeftModel, args: RolloutConfig, arguments: dict[str, Any]) -> None:
    """Raise a `ValueError` if nothing would be trained, `optimizers` does not fit the trained weights, or the model
    could not be copied, rounded, or computed as the settings require. `arguments` are the trainer's others."""
    check_trainable(model, arguments["peft_config"])
    check_optimizers(model, arguments["peft_config"], arguments["optimizers"])
    check_quantization(model, args, arguments["quantization_config"])
    warn_of_rounded_updates(model, args, arguments["peft_config"])
    if isinstance(model, str):
        check_attention(args)
    if args.rollout_lag and not args.use_vllm and not isinstance(model, str):
        check_copy_in_engine_process(model)


def check_trainable(model: str | PreTrainedModel | PeftModel, peft_config: PeftConfig | None) -> None:
    """Raise a `ValueError` if no weight is trained."""
    if peft_config is not None:
        if peft_config.inference_mode:
            raise UserError(
                "peft_config has inference_mode=True, which freezes the adapter, so nothing would be trained. Set it "
                "to False."
            )
        return
    if isinstance(model, str):
        return
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            "All weights of the model are frozen (requires_grad=False), so nothing would be trained. Load an adapter "
            "with `PeftModel.from_pretrained(..., is_trainable=True)`, enable one with `enable_adapter_layers()`, "
            "call `requires_grad_()` after merging one, or pass a peft_config."
        )


# Optimizers ----------------------------------------------------------------------------------------------------


def check_optimizers(
    model: str | PreTrainedModel | PeftModel, peft_config: PeftConfig | None, optimizers: tuple[Any, Any]
) -> None:
    """Raise a `ValueError` if the optimizer has none of the trained weights or steps inside the backward pass, or if
    the scheduler belongs to another optimizer. Log a warning if the optimizer lacks some of them."""
    optimizer, scheduler = optimizers
    if not isinstance(model, str):
        check_backward_hooks(model)
    if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise UserError(
            "optimizers: the scheduler belongs to another optimizer than the one that trains, so the learning rate "
            "would not change. Pass both, as `optimizers=(optimizer, scheduler)`."
        )
    groups = getattr(optimizer, "param_groups", None)  # DeepSpeed's placeholder has none
    if groups is None:
        return
    if isinstance(optimizer, LayerWiseDummyOptimizer) or type(optimizer).__module__.startswith("lomo_optim"):
        raise UserError(f"optimizers: {_steps_in_backward(type(optimizer).__name__)}")
    if isinstance(model, str) or peft_config is not None:
        added_by = "peft_config adds" if peft_config is not None else "the trainer loads"
        raise UserError(
            f"optimizers: {added_by} the weights that are trained later, so the optimizer cannot have them. Pass the "
            "model with its adapter, and an optimizer of its weights; or remove optimizers."
        )
    held = {id(parameter) for group in groups for parameter in group["params"]}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = [name for name, parameter in trained.items() if id(parameter) not in held]
    if len(missing) == len(trained):
        raise UserError(
            "optimizers: the optimizer has none of the weights that the model trains, perhaps those of another copy. "
            "Create it from `model.parameters()` of the model that is passed."
        )
    if missing:
        logger.warning(
            f"optimizers: {len(missing)} of {len(trained)} trained weights are not in the optimizer, so they stay as "
            f"they are: {', '.join(missing[:_MOST_NAMED])}, ..."
        )


def check_backward_hooks(model: nn.Module) -> None:
    """Raise a `ValueError` if gradients are used inside the backward pass."""
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            hook = next(iter(parameter._post_accumulate_grad_hooks.values()))
            hook_name = getattr(hook, "__qualname__", type(hook).__name__)
            raise UserError(f"The weight {name} has a hook. {_steps_in_backward(hook_name)}")


def _steps_in_backward(name: str) -> str:
    return (
        f"{name} uses gradients inside the backward pass, before those of all micro-batches of an optimizer step are "
        "added. Use an optimizer that steps afterwards."
    )


# Compiled layers -----------------------------------------------------------------------------------------------


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
        quantization=_quantization_method(config),
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


# Engines and copies --------------------------------------------------------------------------------------------


def flash_attention_4_error(
    args: RolloutConfig, loading: dict[str, Any], capability: int, planned_gpu: str | None = None
) -> str | None:
    """Return why FlashAttention 4 cannot train, if a model would be loaded with it. `loading` are the arguments of
    `from_pretrained`, `capability` is the major compute capability of the GPU (0 without one), and `planned_gpu` its
    name if another machine trains."""
    if loading.get("attn_implementation") != "flash_attention_4":
        return None
    dtype = loading.get("dtype")
    if dtype in (None, "float32", torch.float32) and not (args.bf16 or args.fp16):
        return (
            "attn_implementation: flash_attention_4 computes in half precision, and the weights are float32 without "
            "autocast. Set bf16: true, or attn_implementation: sdpa."
        )
    if capability < 9:
        device = f"a GPU of compute capability {capability}" if capability else "no GPU"
        device = f"the plan is for an {planned_gpu}" if planned_gpu else f"this machine has {device}"
        return (
            f"attn_implementation: flash_attention_4 is for Hopper and Blackwell GPUs, and {device}. Set "
            "attn_implementation: sdpa."
        )
    return None


# bfloat16 has 8 significant bits: adding less than 2^-9 of a weight has no effect. Adam moves a weight by about the
# learning rate, and typical weights are 0.02.
_SMALLEST_BF16_LEARNING_RATE = 2**-9 * 0.02


def rounded_updates(dtype: Any, learning_rate: float, *, has_float32_copies: bool) -> str | None:
    """Return a warning if weights in half precision would lose most of the updates, in two sentences."""
    name = str(dtype).removeprefix("torch.")
    if name not in ("bfloat16", "float16", "auto") or learning_rate >= _SMALLEST_BF16_LEARNING_RATE:
        return None
    lost = f"dtype={name} with learning_rate={learning_rate:g}: half precision rounds away updates below about "
    lost += f"{_SMALLEST_BF16_LEARNING_RATE:.0e} of typical weights. "
    if has_float32_copies:
        return lost + "FSDP and DeepSpeed train float32 copies; dtype: float32 makes that explicit."
    return lost + "Set dtype: float32 and bf16: true (float32 weights, bfloat16 arithmetic)."


def warn_of_rounded_updates(
    model: str | PreTrainedModel | PeftModel, args: RolloutConfig, peft_config: PeftConfig | None
) -> None:
    """Log a warning, on the first process, if weights in half precision would lose most of the updates."""
    if peft_config is not None or isinstance(model, PeftModel):
        return
    dtype = (args.model_init_kwargs or {}).get("dtype") if isinstance(model, str) else model.dtype
    is_copied = (args.bf16 or args.fp16) and (uses_plugin(args, "FSDP") or uses_plugin(args, "DEEPSPEED"))
    warning = rounded_updates(dtype, args.learning_rate, has_float32_copies=False)
    if warning is not None and not is_copied and args.process_index == 0:
        logger.warning(warning)


# Packages of the attention implementations that transformers does not bring.
_ATTENTION_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def missing_attention(implementation: Any) -> str | None:
    """Return which package an attention implementation lacks on this machine, and what to do; `None` if it lacks none.
    The package `kernels` downloads another implementation instead."""
    package = _ATTENTION_PACKAGES.get(str(implementation))
    if package is None or find_spec(package) is not None or find_spec("kernels") is not None:
        return None
    return (
        f"attn_implementation: {implementation} needs the package {package}, which is not installed here. Install it, "
        "or set attn_implementation: sdpa, which packs completions, too."
    )


def check_attention(args: RolloutConfig) -> None:
    """Raise a `ValueError` if a model to be loaded asks for an attention that is not installed, or cannot train."""
    loading = args.model_init_kwargs or {}
    capability = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    error = flash_attention_4_error(args, loading, capability) or missing_attention(loading.get("attn_implementation"))
    if error:
        raise UserError(error)


def check_quantization(
    model: str | PreTrainedModel | PeftModel, args: RolloutConfig, quantization_config: Any = None
) -> None:
    """Raise a `ValueError` for a quantized model with settings that would convert or copy its packed weights."""
    if not args.generation_dtype and (not args.rollout_lag or args.use_vllm):
        return
    method = _quantization_method(quantization_config or getattr(config_of(model, args), "quantization_config", None))
    if method is None:
        return
    if args.rollout_lag and not args.use_vllm:
        raise UserError(
            f"rollout_lag={args.rollout_lag}: the engine process cannot copy a model quantized with {method}. Remove "
            "rollout_lag, or load the model without quantization."
        )
    if args.generation_dtype and method != "bitsandbytes":
        raise UserError(
            f"generation_dtype={args.generation_dtype!r} would convert the weights of a model quantized with {method} "
            "without their scales. Remove it."
        )


def _quantization_method(config: Any) -> str | None:
    """Return the name of the quantization method, or `None` if weights are not quantized or are dequantized."""
    if config is None:
        return None
    settings = config if isinstance(config, dict) else config.to_dict()
    if settings.get("dequantize"):
        return None
    method = settings.get("quant_method", "unknown")
    return str(getattr(method, "value", method))


def check_copy_in_engine_process(model: PreTrainedModel | PeftModel) -> None:
    """Raise a `ValueError` if the engine process, which builds a model from its class and configuration and loads the
    weights, would build another one than `model`."""
    if changes := changes_in_place(model):
        raise UserError(
            f"rollout_lag: the engine process builds the model from its class and configuration, and would lack "
            f"changes that were made to the given one: {'; '.join(changes[:_MOST_NAMED])}. Undo them, or remove "
            "rollout_lag."
        )


def changes_in_place(model: PreTrainedModel | PeftModel) -> list[str]:
    """Return what differs between a model and one that is built from its class and configuration, except the values
    of weights. Attributes of modules are compared if they are numbers with a fraction."""
    base = without_peft(model)
    if type(base).__module__ == "__main__":
        return [f"its class {type(base).__name__} is defined in the main module"]
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        rebuilt: nn.Module = type(base)(base.config)
        if isinstance(model, PeftModel):
            if len(model.active_adapters) > 1:
                return [f"several active adapters ({', '.join(model.active_adapters)})"]
            rebuilt = _with_same_adapter(rebuilt, model)
    other_adapters = set(model.peft_config) - {model.active_adapter} if isinstance(model, PeftModel) else set()
    expected = dict(rebuilt.named_modules())
    changes = []
    for name, module in model.named_modules():
        if not other_adapters.isdisjoint(name.split(".")):
            continue
        label = name or type(module).__name__
        counterpart = expected.get(name)
        if counterpart is None or type(module) is not type(counterpart):
            changes.append(f"{label} is a {type(module).__name__}")
            continue
        changes += [f"{label}.{change}" for change in _changes_of_module(module, counterpart)]
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, parameter in rebuilt.named_parameters():
        if name not in shapes:
            changes.append(f"{name} is shared or absent")
        elif shapes[name] != tuple(parameter.shape):
            changes.append(f"{name} has the shape {shapes[name]}")
    return changes


def _with_same_adapter(base: nn.Module, model: PeftModel) -> PeftModel:
    """Return a rebuilt base model with the active adapter of `model`, not initialized."""
    settings = model.active_peft_config.to_dict()
    if isinstance(model.active_peft_config, LoraConfig):
        settings["init_lora_weights"] = False
    return get_peft_model(base, type(model.active_peft_config)(**settings), adapter_name=model.active_adapter)


def _changes_of_module(module: nn.Module, expected: nn.Module) -> list[str]:
    changes = []
    forward = vars(module).get("forward")
    if forward is not None and not is_wrapper_of_own_forward(module, forward):
        changes.append("forward is replaced")
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    # transformers adds this one to train adapters with gradient checkpointing.
    hooks = [hook for hook in hooks if getattr(hook, "__name__", "") != "make_inputs_require_grads"]
    if len(hooks) > len(expected._forward_hooks) + len(expected._forward_pre_hooks):
        changes.append("forward has a hook")
    if isinstance(module, BaseTunerLayer) and module.merged:
        changes.append("adapter is merged")
    if not isinstance(module, nn.Dropout):
        for key, value in vars(expected).items():
            if isinstance(value, float) and vars(module).get(key) != value:
                changes.append(f"{key} is {vars(module).get(key)}")
    return changes


def is_wrapper_of_own_forward(module: nn.Module, forward: Any) -> bool:
    """Return whether `forward` wraps the forward method of the module's class, as those that trainers and accelerate
    set on the models they train do."""
    return inspect.unwrap(forward) is inspect.unwrap(type(module).forward)


def trains_routers(config: PreTrainedConfig, args: RolloutConfig) -> bool:
    """Return whether the loss has that of the routers of a mixture of experts with this configuration, as TRL decides
    it when the model is loaded. Architectures that are not in transformers count as having none."""
    text_config, coefficient = config.get_text_config(), args.router_aux_loss_coef
    if coefficient is None:
        coefficient = getattr(text_config, "router_aux_loss_coef", 0.0)
    if not args.is_exact or coefficient == 0 or not hasattr(text_config, "output_router_logits"):
        return False
    backbone = MODEL_MAPPING.get(type(config), None)
    return "router_logits" in (getattr(backbone, "_can_record_outputs", None) or {})


def check_checkpointing_of_routers(args: RolloutConfig) -> None:
    """Raise a `ValueError` if recomputation would cut the gradient of the loss of the routers."""
    if args.gradient_checkpointing is True and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise UserError(
            "The loss of the routers in a mixture of experts has no gradient with use_reentrant: true in "
            "gradient_checkpointing_kwargs. Set use_reentrant: false, or router_aux_loss_coef: 0.0."
        )


def returns_router_logits(model: PreTrainedModel | PeftModel, args: RolloutConfig) -> bool:
    """Return whether a mixture of experts returns the logits of its routers, which their loss needs. If not, raise a
    `ValueError` for an explicit coefficient, and warn if that of the model is left out."""
    base = without_peft(model)
    if "router_logits" in (getattr(base.base_model, "_can_record_outputs", None) or {}):
        return True
    without = f"{type(base).__name__} does not return the logits of its routers, so there is no loss to weight"
    if args.router_aux_loss_coef is not None:
        raise UserError(f"{without} with router_aux_loss_coef={args.router_aux_loss_coef}. Remove the key.")
    warnings.warn(
        f"{without}, although its configuration has a coefficient. It is trained without; router_aux_loss_coef: 0.0 "
        "hides this warning.",
        stacklevel=2,
    )
    return False


def check_adapter_of_tied_weights(model: PreTrainedModel | PeftModel) -> None:
    """Raise a `ValueError` if an adapter changes only the embeddings or only the head of a model in which they share
    their weights: vLLM gets one merged weight for both."""
    if not isinstance(model, PeftModel):
        return
    base = without_peft(model)
    embeddings, head = base.get_input_embeddings(), base.get_output_embeddings()
    if head is None or _original(embeddings).weight is not _original(head).weight:
        return
    adapted = [layer for layer in (embeddings, head) if isinstance(layer, BaseTunerLayer)]
    saved = [layer for layer in (embeddings, head) if isinstance(layer, ModulesToSaveWrapper)]
    if adapted or (saved and embeddings.weight is not head.weight):
        raise UserError(
            "The adapter has its own weights for the embeddings or the head, which share theirs "
            "(tie_word_embeddings), and vLLM would use one merged weight for both. Remove embed_tokens and lm_head "
            "from target_modules and modules_to_save, or set vllm_sync_adapter: true."
        )


def _original(layer: nn.Module) -> nn.Module:
    """Return the layer without adapters."""
    if isinstance(layer, BaseTunerLayer):
        return layer.get_base_layer()
    if isinstance(layer, TrainableTokensWrapper):
        return layer.token_adapter.get_base_layer()
    return layer.original_module if isinstance(layer, AuxiliaryTrainingWrapper) else layer
