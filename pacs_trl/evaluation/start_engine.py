"""From the arguments of an evaluation to a running engine: which weights, which engine, on which devices."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from ..redaction import without_secrets
from . import provenance
from .arguments import EvaluationArguments
from .engines import ServerEngine, TransformersEngine, VLLMEngine
from .replicas import ReplicatedEngine
from .shards import merge_shards


def identify_model(args: EvaluationArguments) -> dict[str, Any]:
    """
    Which weights will be sampled, as plain data. Shards are merged first, see [`~pacs_trl.evaluation.shards.merge_shards`].

    Raises:
        `ValueError`: if there is no such model, or the engine cannot load it.
    """
    if args.engine == "server":
        return without_secrets({"name": args.model, "server": args.base_url})  # results are published
    merge_shards(args.model)
    directory = Path(args.model)
    if (
        args.engine == "vllm"
        and (directory / "adapter_config.json").is_file()
        and not (directory / "config.json").is_file()
    ):
        raise ValueError(
            f"{args.model} holds an adapter, and the vllm engine loads whole models. Merge it into its base model first "
            "(peft: AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...), and the tokenizer), "
            "or use engine 'transformers'."
        )
    return provenance.model_identity(args.model, args.revision)


def start_engine(args: EvaluationArguments) -> Any:
    """
    The engine that the arguments ask for, ready to `generate` and to be closed.

    Raises:
        `ValueError`: if the machine has too few GPUs for the copies, or a server does not offer the model.
    """
    template = args.template_kwargs
    if args.engine == "server":
        return ServerEngine(args.base_url, args.model, concurrency=args.concurrency, chat_template_kwargs=template)
    common: dict[str, Any] = {"revision": args.revision, "dtype": args.dtype, "chat_template_kwargs": template}
    if args.engine == "vllm":
        make = partial(
            VLLMEngine,
            args.model,
            tensor_parallel_size=args.tensor_parallel_size,
            gpu_memory_utilization=args.gpu_memory_utilization,
            max_model_len=args.max_model_len,
            enforce_eager=args.enforce_eager,
            **common,
        )
    else:
        make = partial(TransformersEngine.load, args.model, batch_size=args.batch_size, **common)
    if args.data_parallel_size == 1:
        return make()
    return ReplicatedEngine(
        make, devices_of_copies(args), group_size=args.batch_size if args.engine == "transformers" else 1
    )


def devices_of_copies(args: EvaluationArguments) -> list[str]:
    """The GPUs of each copy, as values of CUDA_VISIBLE_DEVICES; empty on a machine without GPUs."""
    import torch

    each = args.tensor_parallel_size if args.engine == "vllm" else 1
    available = torch.cuda.device_count()
    if available == 0 and args.engine == "transformers":
        return [""] * args.data_parallel_size
    if available < each * args.data_parallel_size:
        raise ValueError(
            f"data_parallel_size {args.data_parallel_size} times {each} GPUs per copy needs "
            f"{each * args.data_parallel_size} GPUs; this machine has {available}."
        )
    # A scheduler may have given us devices 4 to 7: the copies must not take 0 to 3.
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(i) for i in range(available)]
    return [",".join(names[copy * each : (copy + 1) * each]) for copy in range(args.data_parallel_size)]


def engine_facts(args: EvaluationArguments) -> dict[str, Any]:
    """What the results say about the engine."""
    facts: dict[str, Any] = {"name": args.engine, "dtype": args.dtype, "data_parallel_size": args.data_parallel_size}
    if args.engine == "transformers":
        facts["batch_size"] = args.batch_size
    if args.engine == "vllm":
        facts["tensor_parallel_size"] = args.tensor_parallel_size
    return facts
