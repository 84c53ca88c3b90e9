"""Generation with transformers and vLLM: tokens per second, weight synchronization, and mismatch with the trainer.

    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.rollout_engines --engine transformers
    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.rollout_engines --engine vllm --dtype bfloat16
    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.rollout_engines --engine vllm --lora_r 16 --sync_adapter

One line of JSON: generation of 8 prompts x 8 completions of at most 16 tokens (medians), seconds and bytes per weight
synchronization (vLLM), and the difference between vLLM's and the trainer's log-probs on paragraphs of this
repository's documentation. After `make model` and, for vLLM, `make env-vllm`; the trainer has float32 weights.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig

from benchmarks.shared_engine import share_engine
from experiments.miniature.model import build_model
from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl import PACSConfig, PACSTrainer
from pacs_trl.rollouts.engine import Engine


QUESTION = "What is {} + {}? Reply with the number only."


def build_trainer(args: argparse.Namespace, directory: str) -> PACSTrainer:
    """Build a trainer whose engine has the dtype `args.dtype`."""
    settings: dict = {"generation_dtype": None if args.dtype == "float32" else args.dtype, "fast_generation": True}
    if args.engine == "vllm":
        share_engine("cpu", args.dtype)
        settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 256}
        settings["vllm_sync_adapter"] = args.sync_adapter
    if args.model == "miniature":
        args.model = f"{directory}/model"
        tokenizer = build_tokenizer()
        build_model(tokenizer).save_pretrained(args.model)
        tokenizer.save_pretrained(args.model)
    prompts = [{"prompt": [{"role": "user", "content": QUESTION.format(a, b)}]} for a in range(4) for b in range(2)]
    config = PACSConfig(
        directory,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=64,
        max_completion_length=16,
        model_init_kwargs={"dtype": "float32"},
        report_to="none",
        **settings,
    )
    peft_config = LoraConfig(r=args.lora_r, lora_alpha=32, target_modules="all-linear") if args.lora_r else None

    def no_reward(completions, **kwargs) -> list[float | None]:
        return [0.0] * len(completions)

    return PACSTrainer(
        args.model, no_reward, args=config, train_dataset=Dataset.from_list(prompts), peft_config=peft_config
    )


def timed(function, repeats: int) -> tuple[float, float, list]:
    """Return the median wall and CPU seconds of `function` after one call, and its results."""
    times, results = [], []
    for _ in range(repeats + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        results.append(function())
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return *(statistics.median(each) for each in zip(*times[1:], strict=True)), results[1:]


def generation(trainer: PACSTrainer, repeats: int) -> dict:
    """Time the generation of eight completions of each prompt."""
    assert isinstance(trainer.train_dataset, Dataset)
    prompts = [row["prompt"] for row in trainer.train_dataset for _ in range(8)]
    prompt_ids, images, fields = trainer._tokenize_prompts(prompts)

    def generate() -> int:
        trainer._last_loaded_step = trainer.state.global_step  # without synchronization
        return sum(map(len, trainer._generate_single_turn(prompt_ids, images, fields, 8)[0]))

    wall, cpu, tokens = timed(generate, repeats)
    tokens_per_second = statistics.median(tokens) / wall
    return {"generation_wall": wall, "generation_cpu": cpu, "tokens": tokens, "tokens_per_second": tokens_per_second}


def synchronization(trainer: PACSTrainer, repeats: int) -> dict:
    """Time the synchronization of a LoRA adapter that changes each time."""
    engine = trainer.vllm_generation
    assert isinstance(engine, Engine) and trainer.model is not None
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]

    def sync() -> None:
        with torch.no_grad():
            for parameter in trained:
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        engine.sync_weights()

    wall, cpu, _ = timed(sync, repeats)
    if engine.adapter_sync is None:
        sent = sum(weight.numel() * weight.element_size() for _, weight in engine._iter_named_params())
    else:
        sent = sum(file.stat().st_size for file in Path(engine.adapter_sync.directory.name).iterdir())
    return {"sync_wall": wall, "sync_cpu": cpu, "sync_bytes": sent}


def mismatch(trainer: PACSTrainer) -> dict:
    """Compare log-probs of engine and trainer on 16 pieces of 32 + 128 tokens of the documentation."""
    texts = [file.read_text() for file in sorted(Path(__file__).parents[1].glob("docs/*.md"))]
    ids = trainer._tokenizer("\n".join(texts))["input_ids"]
    pieces = [ids[start : start + 160] for start in range(0, 16 * 160, 160)]
    prompts, completions = [piece[:32] for piece in pieces], [piece[32:] for piece in pieces]
    engine_logps = torch.stack([trainer.vllm_generation.llm.prompt_logps(piece)[31:] for piece in pieces])
    result = {}
    for name in ("float32", "bfloat16"):
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "bfloat16"):
            chunks = [slice(i, i + 8) for i in range(0, 16, 8)]
            trainer_logps = torch.stack(
                [row for i in chunks for row in trainer.compute_logps(prompts[i], completions[i])]
            )
        result[f"per_token_{name}"] = (engine_logps - trainer_logps).abs().mean().item()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", choices=["transformers", "vllm"], required=True)
    parser.add_argument("--model", default="outputs/models/SmolLM2-135M-Instruct", help="or `miniature`")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--lora_r", type=int, default=0)
    parser.add_argument("--sync_adapter", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    name = args.model
    with tempfile.TemporaryDirectory() as directory:
        trainer = build_trainer(args, directory)
        measured = synchronization(trainer, args.repeats) if args.lora_r and args.engine == "vllm" else {}
        measured |= generation(trainer, args.repeats)
        if args.engine == "vllm" and not args.lora_r:
            measured |= mismatch(trainer)
    print(json.dumps({"model": name, "engine": args.engine, "dtype": args.dtype, "lora_r": args.lora_r} | measured))


if __name__ == "__main__":
    main()
