"""Checkpoints whose weights are in shards, as FSDP saves them under SHARDED_STATE_DICT, made readable for everybody else."""

import logging
import os
import tempfile
from pathlib import Path


logger = logging.getLogger(__name__)

# Where accelerate puts the shards of the first model. torch.distributed.checkpoint writes `.metadata` last.
_SHARDS = "pytorch_model_fsdp_0"


def merge_shards(model: str) -> None:
    """
    Write the file of weights that `from_pretrained` and vLLM read beside the shards of a checkpoint, whole or not at
    all.

    A directory without shards and a Hub id are left alone, and so is one whose file of weights is not older than its
    shards. Needs the memory and the space on disk of the whole model once more.

    Raises:
        `ValueError`: if the shards are not complete, the configuration is missing, or the directory cannot be written.
    """
    directory = Path(model)
    shards = directory / _SHARDS
    if not shards.is_dir():
        return
    is_adapter = (directory / "adapter_config.json").is_file()
    merged = directory / ("adapter_model.safetensors" if is_adapter else "model.safetensors")
    if not (shards / ".metadata").is_file():
        raise ValueError(
            f"{shards} has no .metadata: writing these shards of the weights was interrupted. Take another one."
        )
    if merged.is_file() and merged.stat().st_mtime_ns >= (shards / ".metadata").stat().st_mtime_ns:
        return
    if not is_adapter and not (directory / "config.json").is_file():
        raise ValueError(
            f"{model} holds shards of weights ({_SHARDS}) but no config.json. Copy configuration and tokenizer (config.json, "
            "generation_config.json, tokenizer*, chat_template*) of the model that training started from into it."
        )
    from accelerate.utils import merge_fsdp_weights
    from safetensors import SafetensorError
    from torch.distributed.checkpoint import CheckpointException

    logger.warning("Merging the shards of %s into %s.", directory, merged.name)
    try:
        with tempfile.TemporaryDirectory(dir=directory) as temporary:
            merge_fsdp_weights(str(shards), temporary)
            os.replace(Path(temporary) / "model.safetensors", merged)
    except (OSError, SafetensorError, CheckpointException) as error:
        reason = error.failures[0][0] if isinstance(error, CheckpointException) else error
        raise ValueError(
            f"The shards of {model} could not be merged into {merged}: {reason}. If they are complete, copy the checkpoint to "
            "where there is room for the whole model once more, and evaluate the copy."
        ) from error
