"""Arguments of `pacs-trl evaluate`, validated before anything is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..data import PROMPT_INSTRUCTION, instruction_for, prompt_of
from ..rewards import VerificationArguments
from ..settings import bounded, illegal_values, read_settings, set_environment, typed_values
from .requests import SamplingSettings


DEFAULT_KS = (1, 4, 8, 16, 32, 64)


@dataclass
class EvaluationArguments:
    """
    Arguments of `pacs-trl evaluate`; a recipe (`--config`) has the same keys.

    Args:
        model (`str`): Checkpoint directory, Hub id, `miniature/<task>` for its warm start, or the name of the model on
            a server.
        benchmarks (`str`): Comma-separated names; `name=PATH` reads a local file, `miniature/<task>` a generated set,
            `module:attribute` is an environment, and the path of a `.jsonl`, `.json`, or `.parquet` file is a set of
            your own.
        output_dir (`str`): Directory of samples, grades, and results.
        n (`int`): Samples per problem.
        k (`str`, *optional*): Comma-separated values of k, each at most `n`; by default 1, 4, 8, 16, 32, and 64, up to
            `n`.
        method (`str`, *optional*): Row label in tables; by default the name of the model.
        revision (`str`, *optional*): Hub revision of the model.
        temperature (`float`): Divides the logits; 0 is greedy decoding.
        top_p (`float`): Nucleus mass in (0, 1]; 1 keeps all tokens.
        top_k (`int`): Number of tokens to sample from; 0 keeps all tokens.
        max_new_tokens (`int`): Completions are truncated at this length.
        seed (`int`): Seed of all samples.
        prompt_instruction (`str`): Sentence appended to the problem; empty for none. LiveCodeBench, GPQA, and
            `miniature/<task>` have their own default.
        system_prompt (`str`, *optional*): Content of a system turn.
        chat_template_kwargs (`dict`, *optional*): Mapping passed to the chat template.
        tools (`list[str]`, *optional*): Functions that the model may call, as in training.
        max_tool_calling_iterations (`int`, *optional*): Largest number of rounds of calls; by default as many as fit.
        engine (`str`): `"transformers"`, `"vllm"`, or `"server"`.
        batch_size (`int`): transformers: completions per call; with tools and environments: conversations at a time.
        dtype (`str`): Dtype of the weights; "auto" keeps that of the checkpoint.
        tensor_parallel_size (`int`): vLLM: GPUs that share one copy of the model.
        gpu_memory_utilization (`float`): vLLM: fraction of GPU memory.
        max_model_len (`int`, *optional*): vLLM: longest prompt plus completion.
        enforce_eager (`bool`): vLLM: start without compilation, for short evaluations.
        base_url (`str`): server: address of the API.
        concurrency (`int`): server: concurrent requests.
        problem_column (`str`, *optional*): Problem column of your own files; by default as in training.
        solution_column (`str`, *optional*): Answer column of your own files; by default as in training.
        max_problems (`int`, *optional*): Evaluate only the first problems of each benchmark, for a quick try.
        reasoning_gym (`dict`, *optional*): Tasks of the benchmarks `reasoning_gym/<task>`, as in training.
    """

    model: str
    benchmarks: str | list[str]
    output_dir: str
    n: int = bounded(128, least=1)
    k: list[int] | str | None = None
    method: str | None = None
    revision: str | None = None
    temperature: float = bounded(0.6, least=0)
    top_p: float = bounded(0.95, above=0, most=1)
    top_k: int = bounded(0, least=0)
    max_new_tokens: int = bounded(8192, least=1)
    seed: int = 0
    prompt_instruction: str = PROMPT_INSTRUCTION
    system_prompt: str | None = None
    chat_template_kwargs: dict | None = None
    tools: list[str] | None = None
    max_tool_calling_iterations: int | None = bounded(None, least=0)
    engine: str = field(default="vllm", metadata={"choices": ("transformers", "vllm", "server")})
    batch_size: int = bounded(64, least=1)
    dtype: str = "auto"
    tensor_parallel_size: int = bounded(1, least=1)
    gpu_memory_utilization: float = bounded(0.9, above=0, most=1)
    max_model_len: int | None = bounded(None, least=1)
    enforce_eager: bool = False
    base_url: str = "http://localhost:8000/v1"
    concurrency: int = bounded(64, least=1)
    problem_column: str | None = None
    solution_column: str | None = None
    max_problems: int | None = bounded(None, least=1)
    reasoning_gym: dict | None = None

    def __post_init__(self):
        if self.k is None:
            self.k = [k for k in DEFAULT_KS if k <= max(1, self.n)]
        self.k = ",".join(map(str, self.k)) if isinstance(self.k, list) else str(self.k)
        if isinstance(self.benchmarks, list):
            self.benchmarks = ",".join(self.benchmarks)
        errors = illegal_values(self)
        if not all(k.strip().isdecimal() and 1 <= int(k) <= self.n for k in self.k.split(",")):
            errors.append(f"k must be whole numbers from 1 to n={self.n}, separated by commas; got {self.k}.")
        if self.base_url != type(self).base_url and self.engine != "server":
            errors.append(
                f"base_url={self.base_url!r} would be ignored with engine {self.engine!r}, which loads the model in "
                "this process. Set engine: server, or remove the key."
            )
        if self.calls_tools and self.engine == "server":
            errors.append("tools and environments need engine transformers or vllm. Change `engine`, or remove them.")
        if self.max_tool_calling_iterations is not None and not self.calls_tools:
            errors.append("max_tool_calling_iterations would be ignored. Set tools or an environment, or remove it.")
        if errors:
            raise ValueError(" ".join(errors))

    @property
    def calls_tools(self) -> bool:
        """Whether completions may have several turns."""
        return bool(self.tools) or any(":" in spec and "=" not in spec for spec in self.benchmarks.split(","))

    @property
    def ks(self) -> list[int]:
        return sorted({int(k) for k in self.k.split(",")})

    def prompt_of(self, problem: str | list, benchmark: Any = None) -> str | list:
        """Build the prompt of a problem, with the instruction of its benchmark unless the user sets one."""
        instruction = instruction_for(benchmark, self.prompt_instruction) if benchmark else self.prompt_instruction
        is_prompt = benchmark is not None and benchmark.is_prompt
        return prompt_of(problem, is_prompt=is_prompt, instruction=instruction, system_prompt=self.system_prompt)

    @property
    def sampling(self) -> SamplingSettings:
        return SamplingSettings(self.temperature, self.top_p, self.top_k, self.max_new_tokens)


def read_evaluation(argv: Sequence[str]) -> tuple[EvaluationArguments, VerificationArguments]:
    """Read `--config RECIPE.yaml [--key value ...]`; raises a `ValueError` for an unknown, missing, or illegal key."""
    parts = (EvaluationArguments, VerificationArguments)
    settings = read_settings(argv)
    values = typed_values(settings, parts, "pacs-trl evaluate")
    set_environment(settings)
    return tuple(part(**{f.name: values[f.name] for f in fields(part)}) for part in parts)
