"""The arguments of `pacs-trl evaluate`, checked before anything is loaded."""

import json
from dataclasses import dataclass, field
from typing import Any

from ..data import PROMPT_INSTRUCTION
from .requests import SamplingSettings


ENGINES = ("transformers", "vllm", "server")


@dataclass
class EvaluationArguments:
    """
    Arguments of `pacs-trl evaluate`; a recipe (`--config`) holds the same keys.

    Args:
        model (`str`): Checkpoint directory, Hub id, or the name under which a server offers the model.
        benchmarks (`str`): Names separated by commas; `name=PATH` reads a local file, `miniature/<task>` a generated set, and
            the path of a `.jsonl`, `.json` or `.parquet` file with the columns `problem` and `answer` is a set of your own.
        output_dir (`str`): Where samples, grades and results go.
        n (`int`): Samples per problem.
        k (`str`): Values of k separated by commas, each at most `n`.
        method (`str`, *optional*): Row label in tables; the name of the model if left out.
        revision (`str`, *optional*): Hub revision of the model.
        temperature, top_p, top_k, max_new_tokens: See `SamplingSettings`.
        seed (`int`): Seed of all samples.
        prompt_instruction (`str`): Sentence behind the problem; empty for the problem alone.
        system_prompt (`str`, *optional*): Content of a system turn.
        chat_template_kwargs (`str` or mapping, *optional*): JSON passed to the chat template.
        engine (`str`): `"transformers"`, `"vllm"` or `"server"`.
        batch_size (`int`): Rows per call of the transformers engine.
        dtype (`str`): Weight dtype; "auto" keeps that of the checkpoint.
        tensor_parallel_size (`int`): vLLM: GPUs per copy of the model.
        data_parallel_size (`int`): Copies of the model (transformers and vLLM).
        gpu_memory_utilization (`float`): vLLM: share of GPU memory.
        max_model_len (`int`, *optional*): vLLM: longest prompt plus completion.
        enforce_eager (`bool`): vLLM: start without compilation; pays off when little is sampled.
        base_url (`str`): Server: address of the API.
        concurrency (`int`): Server: requests in flight.
        max_problems (`int`, *optional*): Only the first so many problems of each benchmark (for trying things out).
        token_entropy_samples (`int`): Measure the token entropy of so many samples per problem; 0: none.
    """

    model: str = field(metadata={"help": "Checkpoint directory, Hub id, or the model name of a server."})
    benchmarks: str = field(metadata={"help": "Names separated by commas; name=PATH, or PATH, for a local file."})
    output_dir: str = field(metadata={"help": "Where samples, grades and results.json go."})
    n: int = field(default=128, metadata={"help": "Samples per problem."})
    k: str = field(default="1,4,8,16,32,64", metadata={"help": "Values of k separated by commas."})
    method: str | None = field(default=None, metadata={"help": "Row label in tables."})
    revision: str | None = field(default=None, metadata={"help": "Hub revision of the model."})
    temperature: float = field(default=0.6, metadata={"help": "Sampling temperature; 0 is greedy."})
    top_p: float = field(default=0.95, metadata={"help": "Nucleus mass."})
    top_k: int = field(default=0, metadata={"help": "Tokens kept; 0 keeps all."})
    max_new_tokens: int = field(default=8192, metadata={"help": "Longest completion in tokens."})
    seed: int = field(default=0, metadata={"help": "Seed of all samples."})
    prompt_instruction: str = field(
        default=PROMPT_INSTRUCTION, metadata={"help": "Sentence behind the problem; empty for the problem alone."}
    )
    system_prompt: str | None = field(default=None, metadata={"help": "Content of a system turn."})
    chat_template_kwargs: str | None = field(default=None, metadata={"help": "JSON for the chat template."})
    engine: str = field(default="vllm", metadata={"help": f"One of {', '.join(ENGINES)}."})
    batch_size: int = field(default=64, metadata={"help": "transformers: rows per call."})
    dtype: str = field(default="auto", metadata={"help": "Weight dtype."})
    tensor_parallel_size: int = field(default=1, metadata={"help": "vLLM: GPUs per copy of the model."})
    data_parallel_size: int = field(default=1, metadata={"help": "Copies of the model."})
    gpu_memory_utilization: float = field(default=0.9, metadata={"help": "vLLM: share of GPU memory."})
    max_model_len: int | None = field(default=None, metadata={"help": "vLLM: longest prompt plus completion."})
    enforce_eager: bool = field(default=False, metadata={"help": "vLLM: start without compilation."})
    base_url: str = field(default="http://localhost:8000/v1", metadata={"help": "server: address of the API."})
    concurrency: int = field(default=64, metadata={"help": "server: requests in flight."})
    max_problems: int | None = field(default=None, metadata={"help": "Only the first so many problems."})
    token_entropy_samples: int = field(default=0, metadata={"help": "Samples per problem for token entropy."})

    def __post_init__(self):
        if isinstance(self.k, int | list):  # a YAML list or a single number is as good as text
            self.k = ",".join(map(str, self.k if isinstance(self.k, list) else [self.k]))
        if isinstance(self.benchmarks, list):
            self.benchmarks = ",".join(self.benchmarks)
        if not isinstance(self.template_kwargs, dict | None):
            raise ValueError(f"chat_template_kwargs must be a JSON object, got {self.chat_template_kwargs!r}.")
        if self.engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {self.engine!r}.")
        if self.engine == "server" and (self.data_parallel_size > 1 or self.token_entropy_samples):
            raise ValueError(
                "A server holds its own copies of the model and gives no distributions: leave data_parallel_size at 1 and "
                "token_entropy_samples at 0 with engine 'server'."
            )
        try:
            ks = self.ks
        except ValueError:
            raise ValueError(f"k must be whole numbers separated by commas, got {self.k!r}.") from None
        if not ks or min(ks) < 1 or max(ks) > self.n:
            raise ValueError(
                f"pass@k needs 1 <= k <= n, got k = {self.k} with n = {self.n} samples. Raise n or drop the larger k."
            )
        for name in ("batch_size", "tensor_parallel_size", "data_parallel_size", "concurrency", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.token_entropy_samples < 0:
            raise ValueError(
                f"token_entropy_samples counts samples per problem, got {self.token_entropy_samples}. Use 0 for none."
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization is a share of the GPU's memory in (0, 1], got {self.gpu_memory_utilization}."
            )
        _ = self.sampling  # its own checks

    @property
    def ks(self) -> list[int]:
        return sorted({int(k) for k in self.k.split(",")})

    @property
    def template_kwargs(self) -> dict[str, Any] | None:
        """`chat_template_kwargs` as a mapping: JSON text from the command line, a mapping from a recipe."""
        given = self.chat_template_kwargs
        return json.loads(given) if isinstance(given, str) else given

    @property
    def sampling(self) -> SamplingSettings:
        return SamplingSettings(self.temperature, self.top_p, self.top_k, self.max_new_tokens)
