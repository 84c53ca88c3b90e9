"""Checks of `generation_kwargs` and other settings that change what is sampled.

Training computes the log-probs of the policy at the temperature. A setting that makes the engine sample from another
distribution gets a warning, or is refused where log-probs of the engine enter the loss; one that does not sample from
the policy at all is refused. `generation_keys.yaml` says which is which.
"""

import logging
from pathlib import Path
from typing import Any

import yaml
from transformers import GenerationConfig

from ..errors import UserError


logger = logging.getLogger(__name__)

_KEYS = yaml.safe_load(Path(__file__).with_name("generation_keys.yaml").read_text(encoding="utf-8"))

# Settings that make the engine sample from another distribution than the policy, and the values that switch them off.
_RESHAPE_POLICY = {
    "top_p": (1.0,),
    "top_k": (0,),
    "min_p": (0.0, None),
    "repetition_penalty": (1.0,),
    "vllm_structured_outputs_regex": (None,),
}


# Those that `generation_kwargs` may have instead, as in TRL. Others are refused there: `temperature` also divides the
# logits of the loss.
_ALSO_IN_KWARGS = ("top_p", "top_k", "min_p")


def refused_keys(engine: str) -> dict[str, str]:
    """Return the reason for each refused key of `generation_kwargs`; `engine` is `"transformers"` or `"vllm"`."""
    return {key: group["why"] for group in _KEYS[engine]["refused"] for key in group["keys"]}


def known_keys(engine: str) -> set[str]:
    """Return all keys of `generation_kwargs` that this package knows for an engine."""
    table = _KEYS[engine]
    return {*_KEYS["settings"], *table["allowed"], *table["reshape_policy"], *refused_keys(engine)}


def end_token_ids(args: Any) -> list[int]:
    """Return the ids in `generation_kwargs` of further tokens that end a completion."""
    ids = (args.generation_kwargs or {}).get("stop_token_ids" if args.use_vllm else "eos_token_id")
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


def generation_errors(args: Any) -> list[str]:
    """Return one message per setting of generation that would be ignored, would fail after the model is loaded, or
    would train on something else than what was sampled."""
    engine = "vllm" if args.use_vllm else "transformers"
    errors = _key_errors(args, engine)
    reshaping = reshaping_settings(args)
    if reshaping and engine_logps_enter_loss(args):
        errors.append(
            f"{', '.join(reshaping)} cannot be used where the log-probs of the engine enter the loss "
            "(vllm_importance_sampling_correction, off_policy_mask_threshold, stale_logps: engine): they are those of "
            "the distribution that the engine samples from, and the trained ones are those of the whole policy. "
            "Remove the former, or set vllm_importance_sampling_correction: false, remove off_policy_mask_threshold, "
            "with rollout_lag set stale_logps: recompute, and remove rollout_schedule."
        )
    if args.fast_generation:
        errors += _shared_cache_errors(args)
    if engine == "transformers" and not errors:
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "cache_implementation")
        settings = {name: getattr(args, name) for name in names} | (args.generation_kwargs or {})
        try:
            GenerationConfig(**{"do_sample": True, **settings})
        except (ValueError, TypeError) as error:
            errors.append(f"transformers rejects the settings of generation: {error} Correct or remove the value.")
    return errors


def _shared_cache_errors(args: Any) -> list[str]:
    """Return one message per setting that contradicts the cache of shared prompts of `fast_generation`."""
    kwargs = args.generation_kwargs or {}
    settings = []
    if args.cache_implementation is not None:
        settings.append(f"cache_implementation={args.cache_implementation!r}")
    if kwargs.get("prefill_chunk_size") is not None:
        settings.append(f"generation_kwargs={{'prefill_chunk_size': {kwargs['prefill_chunk_size']!r}}}")
    if kwargs.get("use_cache") is False:
        settings.append("generation_kwargs={'use_cache': False}")
    if (kwargs.get("num_beams") or 1) > 1:
        settings.append(f"generation_kwargs={{'num_beams': {kwargs['num_beams']!r}}}")
    return [
        f"{setting} cannot be used with fast_generation, which passes a cache with the prompts. Remove one of them."
        for setting in settings
    ]


def _key_errors(args: Any, engine: str) -> list[str]:
    """Return one message per group of keys of `generation_kwargs` that is refused for an engine."""
    kwargs, refused, neutral = args.generation_kwargs or {}, refused_keys(engine), _KEYS[engine]["neutral"]
    errors = []
    if kwargs and args.rollout_engine == "vllm":
        errors.append("generation_kwargs cannot be used with rollout_engine: vllm. Remove one of them.")
    if "seed" in kwargs and args.use_vllm:
        errors.append(
            f"generation_kwargs={{'seed': {kwargs['seed']}}} would generate the same completion for a whole group. "
            "Remove it: a seed for each request follows from `seed`."
        )
    if doubly_set := sorted(kwargs.keys() & _KEYS["settings"].keys() - {*_ALSO_IN_KWARGS}):
        settings = ", ".join(dict.fromkeys(_KEYS["settings"][key] for key in doubly_set))
        errors.append(
            f"generation_kwargs must not have {', '.join(doubly_set)}: the loss, the memory plan, and the log follow "
            f"{settings}, which would have another value. Set {settings} instead."
        )
    for key, value in kwargs.items():
        if key in refused and value is not None and value != neutral.get(key):
            errors.append(f"generation_kwargs={{{key!r}: {value!r}}} is refused: it {refused[key]}. Remove the key.")
    if kwargs.get("do_sample") is False:
        errors.append(
            "generation_kwargs={'do_sample': False} would generate equal completions in each group, which have no "
            "gradient. Remove the key."
        )
    for key in ("eos_token_id", "stop_token_ids"):
        ids = kwargs.get(key, [])
        ids = ids if isinstance(ids, list | tuple) else [ids]
        if not all(type(token) is int and token >= 0 for token in ids):
            errors.append(f"generation_kwargs={{{key!r}: {kwargs[key]!r}}} must be token ids. Correct or remove it.")
    unknown = sorted(kwargs.keys() - known_keys(engine) - vars(GenerationConfig()).keys())
    foreign = sorted(kwargs.keys() & known_keys("transformers") - known_keys("vllm"))
    if unknown and engine == "transformers":  # vLLM rejects those that it does not know
        errors.append(
            f"generation_kwargs has {', '.join(unknown)}, which transformers would ignore. Correct or remove it; "
            "the keys are those of transformers.GenerationConfig."
        )
    if foreign and engine == "vllm":
        errors.append(
            f"generation_kwargs has {', '.join(foreign)}, which vLLM does not know. Correct or remove it; with "
            "use_vllm the keys are those of vllm.SamplingParams (eos_token_id is stop_token_ids there)."
        )
    return errors


def engine_logps_enter_loss(args: Any) -> bool:
    """Return whether log-probs that an engine reports for the distribution that it samples from enter the loss."""
    if args.use_vllm:
        takes_them_with_lag = args.is_asynchronous and args.stale_logps != "recompute"
        masks_by_them = args.off_policy_mask_threshold is not None
        return args.vllm_importance_sampling_correction or masks_by_them or takes_them_with_lag
    return args.rollout_engine == "vllm" and (args.stale_logps == "engine" or args.rollout_schedule == "continuous")


def reshaping_settings(args: Any) -> list[str]:
    """Return settings, as `name=value`, with which tokens are sampled from another distribution than the policy."""
    kwargs = args.generation_kwargs or {}
    reshaping = [
        f"{name}={getattr(args, name)!r}"
        for name, off in _RESHAPE_POLICY.items()
        if getattr(args, name) not in off and name not in kwargs
    ]
    table = _KEYS["vllm" if args.use_vllm else "transformers"]
    for key, value in kwargs.items():
        is_off = value is None or value == table["neutral"].get(key) or value in _RESHAPE_POLICY.get(key, ())
        if key in (*table["reshape_policy"], *_ALSO_IN_KWARGS) and not is_off:
            reshaping.append(f"generation_kwargs={{{key!r}: {value!r}}}")
    return reshaping


def generation_warnings(args: Any) -> list[str]:
    """Return one message per kind of setting that trains, but on a distribution that may not be meant."""
    messages = []
    if reshaping := reshaping_settings(args):
        messages.append(
            f"{', '.join(reshaping)}: completions are not sampled from the policy, whose log-probs are trained. The "
            "gradient is biased; remove the setting unless that is meant."
        )
    if args.use_vllm and (args.generation_kwargs or {}).get("stop"):
        messages.append(
            "generation_kwargs has stop: completions that end with such a text, without an end token, count as "
            "truncated. Name tokens in stop_token_ids instead where that is possible."
        )
    return messages


def check_generation_config(model: Any, args: Any) -> None:
    """Raise a `ValueError` if the model's own generation configuration, which fills in what `generation_kwargs` does
    not set, has keys that are refused; log a warning if it has keys that reshape the policy."""
    table, kwargs = _KEYS["transformers"], args.generation_kwargs or {}
    values = {
        key: value
        for key, value in vars(model.generation_config).items()
        if key not in kwargs and value is not None and value != table["neutral"].get(key)
    }
    remedy = "Remove it from the model's generation_config (generation_config.json)."
    for group in table["refused"]:
        for key in group["keys"]:
            if group.get("also_in_models") and key in values:
                raise UserError(
                    f"The model's generation_config has {key}={values[key]!r}, which {group['why']}. {remedy}"
                )
    reshaping = [key for key in table["reshape_policy"] if key in values]
    if args.min_p is None and values.get("min_p"):
        reshaping.append("min_p")
    if reshaping:
        settings = ", ".join(f"{key}={values[key]!r}" for key in reshaping)
        logger.warning(
            f"The model's generation_config has {settings}: completions are not sampled from the policy, whose "
            f"log-probs are trained. {remedy}"
        )
