"""Checks of a run on several processes: what one of them checks for all, and, after the model is loaded, tools, whole
weights, and equal datasets."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from ..data.columns import is_in_memory
from ..data.images import COLUMNS as IMAGE_COLUMNS
from ..errors import UserError
from .dataset_checks import check_number_of_prompts
from .rollout_config import RolloutConfig


def check_on_first_process(check: Callable[[], None]) -> None:
    """Call `check` on the first process, and raise on all, which must call this, what it raises: the others would wait
    for the first one, unless a launcher ends them."""
    if PartialState().is_main_process:
        try:
            check()
        except Exception as error:
            is_ours = isinstance(error, UserError)  # those of libraries may not be sendable
            broadcast_object_list([error if is_ours else RuntimeError(f"{type(error).__name__}: {error}")])
            raise
    (error_of_first,) = broadcast_object_list([None])
    if error_of_first is not None:
        raise error_of_first


def shared_turns_error(args: RolloutConfig, is_sharded: bool = False) -> str | None:
    """Return an error message if several processes generate together: with tools they would deadlock, because a
    process requests another turn only while its own completions call tools."""
    if args.use_vllm:
        generates_alone = args.vllm_mode == "colocate" and args.vllm_tensor_parallel_size == 1
    else:
        generates_alone = not is_sharded
    if generates_alone or args.world_size == 1:
        return None
    return (
        f"tools with {args.world_size} processes that generate together (a vLLM server, vllm_tensor_parallel_size "
        "above 1, or FSDP and ZeRO-3 without vLLM) would wait forever: a process whose completions call no tool asks "
        "for no further turn. Set use_vllm: true, vllm_mode: colocate, and vllm_tensor_parallel_size: 1."
    )


def check_whole_weights(args: RolloutConfig, is_sharded: bool) -> None:
    """Raise a `ValueError` if generation needs whole weights, which a process does not have."""
    sends_adapter = args.vllm_sync_adapter and args.rollout_schedule == "batch"
    needs_weights = args.fast_generation or args.generation_dtype or sends_adapter
    if needs_weights and (is_sharded or args.use_transformers_continuous_batching):
        raise UserError(
            "`fast_generation`, `generation_dtype`, and `vllm_sync_adapter` need whole weights on every process and "
            "no continuous batching. Remove them with FSDP, ZeRO 3, and use_transformers_continuous_batching."
        )


def check_dataset(dataset: Any, args: RolloutConfig) -> None:
    """Raise a `ValueError` if the training set differs between processes or is too small for a generation batch. All
    processes must call this. Streaming datasets are skipped."""
    if not hasattr(dataset, "__len__"):
        return
    sizes = gather_object([len(dataset)])
    if len(set(sizes)) > 1:
        raise UserError(
            f"Processes disagree on the number of prompts in the training set: {sizes}. All processes must load "
            "the same data with the same seed, or groups would be incomplete."
        )
    if args.world_size > 1 and len(set(gather_object([prompt_digest(dataset)]))) > 1:
        raise UserError(
            "Processes disagree on the prompts of the training set or on their order, so that groups would mix "
            "prompts. Load the same data on all processes, and pass a seed to `shuffle`."
        )
    check_number_of_prompts(len(dataset), args)


def prompt_digest(dataset: Any) -> str | None:
    """Return a digest of at most two thousand prompts, evenly spaced, that is equal in all processes and runs that
    have them in this order, whatever the format of the dataset and the version of the library; of whole rows, if they
    have no prompt. Images are left out. It is `None` for a dataset that is not in memory."""
    if not is_in_memory(dataset):
        return None
    positions = range(0, len(dataset), max(1, len(dataset) // 1000))
    columns = [name for name in dataset.column_names if name not in IMAGE_COLUMNS]
    if "prompt" in columns:
        columns = ["prompt"]
    digest = hashlib.sha256()
    for row in dataset.with_format(None).select_columns(columns).select(positions):
        text = json.dumps(_without_absent_keys(row), sort_keys=True, default=lambda value: type(value).__name__)
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()


def _without_absent_keys(value: Any) -> Any:
    """Return nested values without the keys that are null: whether a column of mappings has all keys of all of them
    depends on the version of datasets."""
    if isinstance(value, dict):
        return {key: _without_absent_keys(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_absent_keys(item) for item in value]
    return value
