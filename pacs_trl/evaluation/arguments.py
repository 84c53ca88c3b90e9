"""The arguments of `pacs-trl evaluate`, checked before anything is loaded."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..data import PROMPT_INSTRUCTION, instruction_for, prompt_of
from ..rewards import VerificationArguments
from ..settings import asks_for_help, print_help, read_settings, set_environment, typed_values
from .requests import SamplingSettings


ENGINES = ("transformers", "vllm", "server")
DEFAULT_KS = (1, 4, 8, 16, 32, 64)
# Smallest legal values; in training some of these settings have others.
_LEAST = {
    **dict.fromkeys(("n", "max_new_tokens", "max_problems", "batch_size", "tensor_parallel_size"), 1),
    **dict.fromkeys(("concurrency", "max_model_len"), 1),
    **dict.fromkeys(("temperature", "top_k", "token_entropy_samples"), 0),
}


@dataclass
class EvaluationArguments:
    """
    Arguments of `pacs-trl evaluate`; a recipe (`--config`) holds the same keys.

    Args:
        model (`str`): Checkpoint directory, Hub id, `miniature/<task>` for its warm start, or the name under which a
            server offers the model.
        benchmarks (`str`): Names separated by commas; `name=PATH` reads a local file, `miniature/<task>` a generated
            set, and the path of a `.jsonl`, `.json` or `.parquet` file is a set of your own.
        output_dir (`str`): Where samples, grades and results go.
        n (`int`): Samples per problem.
        k (`str`, *optional*): Values of k separated by commas, each at most `n`. By default 1, 4, 8, 16, 32 and 64, as
            far as `n` goes.
        method (`str`, *optional*): Row label in tables; the name of the model if left out.
        revision (`str`, *optional*): Hub revision of the model.
        temperature (`float`): Divides the logits; 0 is greedy decoding.
        top_p (`float`): Nucleus mass in (0, 1]; 1 keeps every token.
        top_k (`int`): Number of tokens kept; 0 keeps every token.
        max_new_tokens (`int`): Completions are truncated at this many tokens.
        seed (`int`): Seed of all samples.
        prompt_instruction (`str`): Sentence behind the problem; empty for the problem alone. LiveCodeBench and GPQA
            bring another default, `miniature/<task>` an empty one.
        system_prompt (`str`, *optional*): Content of a system turn.
        chat_template_kwargs (`str` or mapping, *optional*): JSON passed to the chat template.
        engine (`str`): `"transformers"`, `"vllm"` or `"server"`.
        batch_size (`int`): Completions per call of the transformers engine.
        dtype (`str`): Weight dtype; "auto" keeps that of the checkpoint.
        tensor_parallel_size (`int`): vLLM: GPUs per copy of the model.
        gpu_memory_utilization (`float`): vLLM: share of GPU memory.
        max_model_len (`int`, *optional*): vLLM: longest prompt plus completion.
        enforce_eager (`bool`): vLLM: start without compilation; pays off when little is sampled.
        base_url (`str`): Server: address of the API.
        concurrency (`int`): Server: requests in flight.
        problem_column (`str`, *optional*): Column of the problem in files of your own; by default found as in
            training.
        solution_column (`str`, *optional*): Column of the gold answer in files of your own, likewise.
        max_problems (`int`, *optional*): Only the first so many problems of each benchmark (for trying things out).
        token_entropy_samples (`int`): Measure the token entropy of so many samples per problem; 0: none.
    """

    model: str
    benchmarks: str | list[str]
    output_dir: str
    n: int = 128
    k: list[int] | str | None = None
    method: str | None = None
    revision: str | None = None
    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 0
    max_new_tokens: int = 8192
    seed: int = 0
    prompt_instruction: str = PROMPT_INSTRUCTION
    system_prompt: str | None = None
    chat_template_kwargs: dict | str | None = None
    engine: str = field(default="vllm", metadata={"choices": ENGINES})
    batch_size: int = 64
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    enforce_eager: bool = False
    base_url: str = "http://localhost:8000/v1"
    concurrency: int = 64
    problem_column: str | None = None
    solution_column: str | None = None
    max_problems: int | None = None
    token_entropy_samples: int = 0

    def __post_init__(self):
        if self.k is None:
            self.k = [k for k in DEFAULT_KS if k <= max(1, self.n)]
        if isinstance(self.k, int | list):  # as YAML has it
            self.k = ",".join(map(str, self.k if isinstance(self.k, list) else [self.k]))
        if isinstance(self.benchmarks, list):
            self.benchmarks = ",".join(self.benchmarks)
        errors = [
            f"{name} must be at least {least}, got {getattr(self, name)}."
            for name, least in _LEAST.items()
            if getattr(self, name) is not None and getattr(self, name) < least
        ]
        errors += [
            f"{name} is a share in (0, 1], got {getattr(self, name)}."
            for name in ("top_p", "gpu_memory_utilization")
            if not 0 < getattr(self, name) <= 1
        ]
        if not all(k.strip().isdecimal() and 1 <= int(k) <= self.n for k in self.k.split(",")):
            errors.append(f"k must be whole numbers from 1 to n = {self.n}, separated by commas; got {self.k}.")
        if not isinstance(self.template_kwargs, dict | None):
            errors.append(f"chat_template_kwargs must be a JSON object, got {self.chat_template_kwargs!r}.")
        if self.base_url != type(self).base_url and self.engine != "server":
            errors.append(
                f"base_url={self.base_url!r} would be ignored, and the model loaded here, with engine "
                f"{self.engine!r}. Set engine: server, or remove the key."
            )
        if self.engine == "server" and self.token_entropy_samples:
            errors.append("token_entropy_samples needs distributions, which a server does not return. Set it to 0.")
        if errors:
            raise ValueError(" ".join(errors))

    @property
    def ks(self) -> list[int]:
        return sorted({int(k) for k in self.k.split(",")})

    @property
    def group_size(self) -> int:
        """Requests that are always generated together, because the text of each depends on it."""
        return self.batch_size if self.engine == "transformers" else 1

    @property
    def template_kwargs(self) -> dict[str, Any] | None:
        """`chat_template_kwargs` as a mapping: JSON text from the command line, a mapping from a recipe."""
        given = self.chat_template_kwargs
        return json.loads(given) if isinstance(given, str) else given

    def prompt_of(self, problem: str | list, benchmark: Any = None) -> str | list:
        """The prompt of a problem, with the sentence of its benchmark if that brings one and none is given."""
        instruction = instruction_for(benchmark, self.prompt_instruction) if benchmark else self.prompt_instruction
        as_it_stands = benchmark is not None and benchmark.as_it_stands
        return prompt_of(problem, as_it_stands=as_it_stands, instruction=instruction, system_prompt=self.system_prompt)

    @property
    def sampling(self) -> SamplingSettings:
        return SamplingSettings(self.temperature, self.top_p, self.top_k, self.max_new_tokens)


def read_evaluation(argv: Sequence[str]) -> tuple[EvaluationArguments, VerificationArguments]:
    """
    Read `--config RECIPE.yaml [--key value ...]`.

    Raises:
        `SystemExit`: with code 0, after the help.
        `ValueError`: if a key is unknown or missing, or a value is illegal.
    """
    parts = (EvaluationArguments, VerificationArguments)
    if asks_for_help(argv):
        print_help(
            "pacs-trl evaluate [--config FILE.yaml] --model MODEL --benchmarks NAMES --output_dir DIR [--key ...]",
            "Sample, grade, and count: pass@k of a model on benchmarks. The command line wins over the file. The same "
            "command again samples only what is missing.",
            [part.__name__ for part in parts],
        )
    settings = read_settings(argv)
    values = typed_values(settings, parts, "pacs-trl evaluate")
    set_environment(settings)
    evaluation, verification = (part(**{f.name: values[f.name] for f in fields(part)}) for part in parts)
    return evaluation, verification
