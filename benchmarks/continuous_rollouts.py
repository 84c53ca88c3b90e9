"""Continuous rollouts on two cores: slots in use, and seconds of a whole step beside generation and update alone.

    OMP_NUM_THREADS=1 python -m benchmarks.continuous_rollouts

A vLLM server for CPUs (`make env-vllm`) with all its processes is pinned to the last core, trainer and worker to the
first one. The model is untrained, and ends a completion after each token with equal chance, so that lengths are
geometric, cut off at the longest: their mean is 0.1 and 0.35 of it. Half of the groups are uniform, which training
skips, so that generation takes somewhat longer than an update. A table has a row per schedule:

- `generation`: requests without a trainer, more than slots, with a transfer of weights per step as in training, after
  which all prefixes are computed again;
- `in turn`, `one late`: groups start as with `rollout_lag` 0 and 1, on the same server and worker;
- `continuous`: `rollout_schedule: continuous`.

`s / 1000 tokens` are seconds per 1,000 completion tokens that are trained on, from the end of the first steps to that
of the last one; `update` is the part of them that is neither generation nor transfer. `slots` is the mean of
`vllm:num_requests_running` over the slots. `times longer side`: the whole step of a schedule over the longer of
generation and update, where `update` is that of `in turn`, in which the other core is idle. Each row is printed as
JSON too, as soon as it is measured.
"""

import argparse
import asyncio
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import aiohttp
import httpx
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl.experimental.async_grpo.vllm_client import VLLMClient

from benchmarks import record_row, table_of
from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl import GRPOConfig, GRPOTrainer
from pacs_trl.rollouts.continuous import ContinuousRollouts
from pacs_trl.rollouts.server_command import EXTENSION
from pacs_trl.rollouts.weight_transfer import SharedMemoryTransfer


CORES = sorted(os.sched_getaffinity(0))
NUM_GENERATIONS = 4
PROMPT_TOKENS = 32  # at most
STALENESS = 4
SCHEDULES = {"in turn": 0, "one late": 1, "continuous": STALENESS}  # batches, or at most steps, that are late


# Model, data, and reward -------------------------------------------------------------------------------------------


def end_probability(mean: float, longest: int) -> float:
    """Return the chance of an end after each token with which lengths, cut off at `longest`, have this mean."""
    low, high = 1e-9, 1.0
    for _ in range(100):
        chance = (low + high) / 2
        if (1 - (1 - chance) ** longest) / chance > mean:
            low = chance
        else:
            high = chance
    return high


def build_model(tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> Qwen3ForCausalLM:
    """Return an untrained model that ends completions with equal chance after each token."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    chance = end_probability(args.mean, args.longest[0])
    logit = math.log(chance / (1 - chance) * (len(tokenizer) - 1))
    with torch.no_grad():  # the first hidden dimension is the same for all tokens, and nearly the only one
        model.model.embed_tokens.weight.mul_(0.1)
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
        model.lm_head.weight.mul_(0.05)
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[tokenizer.eos_token_id, 0] = logit / math.sqrt(args.hidden)
    return model


def reward(completions: list, is_uniform: list[bool], **kwargs: Any) -> list[float | None]:
    return [float(i % 2 and not uniform) for i, uniform in enumerate(is_uniform)]


def problems(share_uniform: float) -> Dataset:
    """Return questions of which a share, evenly distributed, has a uniform reward, which training skips."""
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": f"{i} + 1"}],
                "is_uniform": int((i + 1) * share_uniform) > int(i * share_uniform),
            }
            for i in range(2000)
        ]
    )


# Server ------------------------------------------------------------------------------------------------------------


class Server:
    """A vLLM server for CPUs, and the mean number of requests that it decodes."""

    def __init__(self, model: str, args: argparse.Namespace):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.slots = f"http://127.0.0.1:{port}", args.slots
        context = PROMPT_TOKENS + max(args.longest)
        command = (
            f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {model} --port {port} --host 127.0.0.1"
        )
        command += f" --dtype float32 --enforce-eager --max-model-len {context} --max-num-seqs {args.slots}"
        command += f" --max-num-batched-tokens {args.slots * context} --worker-extension-cls {EXTENSION}"
        command += " --logprobs-mode processed_logprobs --max-logprobs -1 --disable-uvicorn-access-log"
        environment = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        environment |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            ["taskset", "-c", str(CORES[-1]), *command.split()],
            env=os.environ | environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
        )

    def wait_until_ready(self) -> None:
        while True:
            try:
                httpx.get(f"{self.url}/health", timeout=5).raise_for_status()
                return
            except httpx.HTTPError:
                if self.process.poll() is not None:
                    raise SystemExit("The vLLM server has ended. See its output above.") from None
                time.sleep(0.5)

    def running(self) -> float:
        """Return the number of requests that are decoded now."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        return sum(float(value) for value in re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.M))

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def worker_seconds(self) -> float:
        """Return the CPU seconds of the server's worker process so far."""
        total = 0.0
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat") as file:
                    name, _, rest = file.read().partition(") ")
                fields = rest.split()
                if int(fields[3]) == self.process.pid and "VLLM::Worker" in name:  # of this session
                    total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            except (FileNotFoundError, ProcessLookupError):
                pass
        return total


class Sampler:
    """Samples the slots in use, and the CPU time of the server's worker, between `start` and `stop`."""

    def __init__(self, server: Server):
        self.server = server
        self.samples: list[float] = []
        self._stopped = threading.Event()

    def start(self) -> None:
        self._began, self._worker = time.perf_counter(), self.server.worker_seconds()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stopped.wait(0.7):
            self.samples.append(self.server.running())

    def stop(self) -> dict[str, float]:
        seconds, worker = time.perf_counter() - self._began, self.server.worker_seconds() - self._worker
        self._stopped.set()
        self._thread.join()
        slots = sum(self.samples) / max(1, len(self.samples)) / self.server.slots
        return {"slots": slots, "worker's share of its core": worker / seconds}


# Generation without a trainer --------------------------------------------------------------------------------------


async def keep_generating(server: Server, prompts: list[list[int]], longest: int, count: Any) -> None:
    """Send more requests than the server has slots, without end; `count()` is called for each token."""

    async def send(session: aiohttp.ClientSession, number: int) -> None:
        while True:
            body = {
                "prompt": prompts[number % len(prompts)],
                "max_tokens": longest,
                "temperature": 1.0,
                "stream": True,
            }
            body |= {"return_token_ids": True, "logprobs": 0, "seed": number}
            async with session.post(f"{server.url}/v1/completions", json=body) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                            count(len(choice["token_ids"] or ()))
            number += 2 * server.slots

    async with aiohttp.ClientSession(headers={"Connection": "close"}) as session:
        await asyncio.gather(*(send(session, number) for number in range(2 * server.slots)))


def generate_alone(
    server: Server, model: Qwen3ForCausalLM, prompts: list, args: argparse.Namespace, longest: int
) -> dict:
    """Return seconds per 1,000 tokens with full slots, and weights that are replaced once per step of tokens."""
    transfer = SharedMemoryTransfer(VLLMClient(server.url))
    transfer.init_weight_transfer()
    tokens_per_step = args.completions * min(args.mean, longest)
    tokens = 0
    ends: list[tuple[float, int]] = []  # of steps: the time, and tokens so far
    sampler = Sampler(server)

    def replace_weights() -> None:
        transfer.stage(iter(model.state_dict().items()))
        transfer.pause()
        transfer.load()
        transfer.resume()

    async def measure() -> None:
        nonlocal tokens
        reached = asyncio.Event()

        def count(number: int) -> None:
            nonlocal tokens
            tokens += number
            if tokens >= tokens_per_step * (len(ends) + 1):
                ends.append((time.perf_counter(), tokens))
                reached.set()

        generation = asyncio.create_task(keep_generating(server, prompts, longest, count))
        while len(ends) <= args.steps and not generation.done():
            await asyncio.wait([asyncio.create_task(reached.wait()), generation], return_when=asyncio.FIRST_COMPLETED)
            if len(ends) == 1 and not sampler.samples:
                sampler.start()
            reached.clear()
            await asyncio.to_thread(replace_weights)
        if generation.done():
            await generation  # raises
        generation.cancel()
        await asyncio.gather(generation, return_exceptions=True)

    asyncio.run(measure())
    measured = sampler.stop()
    transfer.destroy()
    (first, tokens_before), (last, tokens_after) = ends[0], ends[args.steps]
    thousands = (tokens_after - tokens_before) / 1000
    return {"schedule": "generation", "s / 1000 tokens": (last - first) / thousands, **measured}


# Training ----------------------------------------------------------------------------------------------------------


class InBatches(ContinuousRollouts):
    """Starts the groups of a batch together, as with `rollout_lag` 0 or 1: `batches_late` batches before their step,
    with the weights of that moment to their end."""

    def __init__(self, trainer, batches_late: int):
        super().__init__(trainer)
        self.batches_late = batches_late

    def send_weights(self) -> None:
        if self._worker is not None and self.batches_late:  # the batch in flight ends with its weights
            self._wait_for_groups(self.groups_per_step)
        super().send_weights()

    def _admit(self, *, is_taken: bool) -> None:
        step = self.trainer.state.global_step
        late = self.batches_late if is_taken else 0
        batches = min(step + 1 + late, self.trainer.state.max_steps)
        assert self._worker is not None
        self._worker.shared.admitted = self.groups_per_step * batches


class Clock(TrainerCallback):
    """Notes when optimizer steps end, and what they have trained on."""

    def __init__(self, server: Server, skipped: int, last: int):
        self.sampler, self.skipped, self.last = Sampler(server), skipped, last
        self.tokens = 0
        self.seconds: list[float] = []
        self.measured: dict[str, float] = {}
        self.source: ContinuousRollouts

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter())
        if state.global_step == self.skipped:
            self.sampler.start()
        elif state.global_step > self.skipped:
            self.tokens += sum(len(ids) for group in self.source._taken for ids in group.completion_ids)
        if state.global_step == self.last:  # before the end of the run, at which no more groups are started
            self.measured = self.sampler.stop()
            control.should_training_stop = True


def train(schedule: str, server: Server, model: str, data: Dataset, args: argparse.Namespace, longest: int) -> dict:
    """Train with a schedule, and return its row."""
    steps, skipped = args.steps, args.skip
    if schedule != "continuous":
        steps, skipped = args.steps_in_batches, 2
    clock = Clock(server, skipped, skipped + steps)

    class Trainer(GRPOTrainer):
        def _create_source(self):
            clock.source = ContinuousRollouts(self)
            if schedule != "continuous":
                clock.source = InBatches(self, SCHEDULES[schedule])
            return clock.source

    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            directory,
            use_cpu=True,
            bf16=False,
            model_init_kwargs={"dtype": "float32"},
            per_device_train_batch_size=args.completions,
            gradient_accumulation_steps=1,
            num_generations=NUM_GENERATIONS,
            max_completion_length=longest,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=server.url,
            vllm_server_timeout=300,
            rollout_schedule="continuous",
            max_staleness=STALENESS,
            shuffle_dataset=False,
            learning_rate=1e-8,  # lengths keep their distribution
            max_steps=skipped + steps + STALENESS + 2,
            gradient_checkpointing=False,
            startup_check=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model, reward, args=config, train_dataset=data, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [log for log in trainer.state.log_history if "time/total" in log][skipped:]
    learning = sum(log["time/total"] - log["time/generation"] - log["time/weight_sync"] for log in logs)
    waited = sum(log["async/learner_wait"] for log in logs)
    thousands = clock.tokens / 1000
    return {
        "schedule": schedule,
        "s / step": (clock.seconds[-1] - clock.seconds[skipped - 1]) / steps,
        "tokens / step": clock.tokens / steps,
        "s / 1000 tokens": (clock.seconds[-1] - clock.seconds[skipped - 1]) / thousands,
        "update, s / 1000 tokens": (learning - waited) / thousands,
        "transfer, s / step": sum(log["time/weight_sync"] for log in logs) / steps,
        **clock.measured,
        "updates late": sum(log["async/lag_updates"] for log in logs) / len(logs),
        "dropped": sum(log["async/dropped_groups"] for log in logs),
        "weights changed inside": sum(log["async/changed_weights_fraction"] for log in logs) / len(logs),
    }


def compare(server: Server, model: str, data: Dataset, args: argparse.Namespace, longest: int) -> list[dict]:
    """Return the rows of one longest length."""
    tokenizer, policy = build_tokenizer(), Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    messages = data["prompt"][: 10 * server.slots]
    prompts = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]
    rows = [generate_alone(server, policy, prompts, args, longest)]
    print(json.dumps(rows[-1]), flush=True)
    for schedule in args.schedules:
        rows.append(train(schedule, server, model, data, args, longest))
        print(json.dumps(rows[-1]), flush=True)
    sides = rows[0]["s / 1000 tokens"], rows[1]["update, s / 1000 tokens"]
    for row in rows:
        row["times longer side"] = row["s / 1000 tokens"] / max(sides)
    return [{"longest": longest, **row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=[*SCHEDULES])
    parser.add_argument("--longest", type=int, nargs="+", default=[512, 128], help="tokens; the first has the mean")
    parser.add_argument("--mean", type=float, default=51.0, help="tokens of a completion of the first longest length")
    parser.add_argument("--uniform", type=float, default=0.5, help="share of groups that training skips")
    parser.add_argument("--completions", type=int, default=16, help="per optimizer step")
    parser.add_argument("--steps", type=int, default=10, help="that are measured")
    parser.add_argument("--steps_in_batches", type=int, default=4, help="that are measured in turn and one batch late")
    parser.add_argument(
        "--skip", type=int, default=5, help="steps before those of the continuous schedule; 2 before others"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end the server
    torch.set_num_threads(1)
    os.sched_setaffinity(0, CORES[:1])
    data, tokenizer = problems(args.uniform), build_tokenizer()
    with tempfile.TemporaryDirectory() as model:
        built = build_model(tokenizer, args)
        built.save_pretrained(model)
        tokenizer.save_pretrained(model)
        print(f"{built.num_parameters() / 1e6:.1f} million parameters, {args.slots} slots", flush=True)
        server = Server(model, args)
        try:
            server.wait_until_ready()
            for longest in args.longest:
                rows = compare(server, model, data, args, longest)
                for row in rows:
                    record_row(row)
                print(table_of(rows), flush=True)
        finally:
            server.close()


if __name__ == "__main__":
    main()
