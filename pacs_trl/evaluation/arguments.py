"""Arguments of `pacs-trl evaluate`, validated before anything is loaded."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ..data import PROMPT_INSTRUCTION, instruction_for, prompt_of
from ..errors import UserError
from ..rewards import VerificationArguments
from ..settings import read_settings, set_environment, typed_values
from ..settings.checks import illegal_values
from ..settings.fields import setting
from ..settings.trl_settings import DTYPES
from .requests import SamplingSettings


if TYPE_CHECKING:  # slow to import, and `--help` needs this module
    from .benchmarks import LoadedBenchmark


logger = logging.getLogger(__name__)

DEFAULT_KS = (1, 4, 8, 16, 32, 64)
# The engines that read a setting, of settings that not every engine reads.
_READ_BY = {
    "revision": ("transformers", "vllm"),
    "trust_remote_code": ("transformers", "vllm"),
    "dtype": ("transformers", "vllm"),
    "batch_size": ("transformers",),
    "tensor_parallel_size": ("vllm",),
    "gpu_memory_utilization": ("vllm",),
    "max_model_len": ("vllm",),
    "enforce_eager": ("vllm",),
    "base_url": ("server",),
    "concurrency": ("server",),
}
# Those of them that set speed and memory alone. The others say what is measured.
_WITHOUT_EFFECT_ON_RESULTS = {
    "batch_size",
    "concurrency",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "enforce_eager",
}


@dataclass
class EvaluationArguments:
    """Arguments of `pacs-trl evaluate`; a recipe (`--config`) has the same keys."""

    # Parameters that select model, benchmarks, and output
    model: str = field(metadata={"help": "Checkpoint directory, Hub id, or the name of the model on a server."})
    benchmarks: str | list[str] = field(
        metadata={
            "help": "Comma-separated names; `name=PATH` reads a local file, `module:attribute` is an environment, and "
            "the path of a `.jsonl`, `.json`, or `.parquet` file is a set of your own."
        }
    )
    output_dir: str = field(metadata={"help": "Directory of samples, grades, and results."})
    n: int = setting(128, "Samples per problem.", least=1)
    k: list[int] | str | None = setting(
        None, "Comma-separated values of k, each at most `n`; by default 1, 4, 8, 16, 32, and 64, up to `n`."
    )
    method: str | None = setting(
        None, "Row label in tables; by default the name of the model, such as `pacs/checkpoint-100`."
    )
    revision: str | None = setting(None, "Hub revision of the model.")
    trust_remote_code: bool = setting(False, "Run code that the checkpoint contains, as in training.")

    # Parameters that control sampling
    temperature: float = setting(0.6, "Divides the logits; 0 is greedy decoding.", least=0)
    top_p: float = setting(0.95, "Nucleus mass in (0, 1]; 1 keeps all tokens.", above=0, most=1)
    top_k: int = setting(0, "Number of tokens to sample from; 0 keeps all tokens.", least=0)
    max_new_tokens: int = setting(8192, "Completions are truncated at this length.", least=1)
    seed: int = setting(0, "Seed of all samples.")

    # Parameters that control prompts and tools
    prompt_instruction: str = setting(
        PROMPT_INSTRUCTION,
        "Sentence appended to the problem; empty for none. LiveCodeBench and GPQA have their own default.",
    )
    system_prompt: str | None = setting(None, "Content of a system turn.")
    chat_template_kwargs: dict | None = setting(None, "Mapping passed to the chat template.")
    tools: list[str] | None = setting(None, "Functions that the model may call, as in training.")
    max_tool_calling_iterations: int | None = setting(
        None, "Largest number of rounds of calls; by default as many as fit.", least=0
    )

    # Parameters that control the engine
    engine: str = setting(
        "vllm", '`"transformers"`, `"vllm"`, or `"server"`.', choices=("transformers", "vllm", "server")
    )
    batch_size: int = setting(
        64, "transformers: completions per call; with tools and environments: conversations at a time.", least=1
    )
    dtype: str = setting("auto", 'Dtype of the weights; "auto" keeps that of the checkpoint.', choices=DTYPES)
    tensor_parallel_size: int = setting(1, "vLLM: GPUs that share one copy of the model.", least=1)
    gpu_memory_utilization: float = setting(0.9, "vLLM: fraction of GPU memory.", above=0, most=1)
    max_model_len: int | None = setting(None, "vLLM: longest prompt plus completion.", least=1)
    enforce_eager: bool = setting(False, "vLLM: start without compilation, for short evaluations.")
    base_url: str = setting("http://localhost:8000/v1", "server: address of the API.")
    concurrency: int = setting(64, "server: concurrent requests.", least=1)

    # Parameters that control the problems
    problem_column: str | None = setting(None, "Problem column of your own files; by default as in training.")
    solution_column: str | None = setting(None, "Answer column of your own files; by default as in training.")
    max_problems: int | None = setting(
        None, "Evaluate only the first problems of each benchmark, for a quick try.", least=1
    )
    reasoning_gym: dict | None = setting(None, "Tasks of the benchmarks `reasoning_gym/<task>`, as in training.")

    def __post_init__(self):
        if self.k is None:
            self.k = [k for k in DEFAULT_KS if k <= max(1, self.n)]
        errors = illegal_values(self)
        ks = _comma_separated(self.k)
        if self.n >= 1 and not all(k.isdecimal() and 1 <= int(k) <= self.n for k in ks):
            errors.append(
                f"k must be whole numbers from 1 to n={self.n}, separated by commas; got {','.join(ks)}. Raise n, or "
                "correct k; without the key it goes up to n."
            )
        errors += self._errors_of_ignored_settings()
        if self.calls_tools and self.engine == "server":
            errors.append("tools and environments need engine transformers or vllm. Change `engine`, or remove them.")
        if self.max_tool_calling_iterations is not None and not self.calls_tools:
            errors.append("max_tool_calling_iterations would be ignored. Set tools or an environment, or remove it.")
        if errors:
            raise UserError(" ".join(errors))

    def _errors_of_ignored_settings(self) -> list[str]:
        """Return a message for each setting that the engine ignores and that says what is measured."""
        defaults = {declared.name: declared.default for declared in fields(self)}
        messages = []
        for name, engines in self._ignored_settings().items():
            if name in _WITHOUT_EFFECT_ON_RESULTS:
                continue
            message = f"{name}={getattr(self, name)!r} would be ignored with engine {self.engine!r}"
            if self.engine == "server":
                message += ", which does not load the model in this process. Give it to the server, and remove the key"
            else:
                message += f". Set engine: {' or '.join(engines)}, or remove the key"
            messages.append(f"{message}, or set its default ({name}: {json.dumps(defaults[name])}).")
        return messages

    def warn_of_ignored_settings(self) -> None:
        """Warn of the settings that the engine ignores and that change no result, as a recipe for another engine has
        them."""
        ignored = [name for name in self._ignored_settings() if name in _WITHOUT_EFFECT_ON_RESULTS]
        if ignored:
            logger.warning(
                f"The engine {self.engine!r} ignores {', '.join(ignored)}, which changes no result. Remove what is "
                "for another engine to hide this warning."
            )

    def _ignored_settings(self) -> dict[str, tuple[str, ...]]:
        """Return the settings that differ from their default and that the engine does not read, with those that do."""
        defaults = {declared.name: declared.default for declared in fields(self)}
        read_by = dict(_READ_BY)
        if self.calls_tools:
            read_by["batch_size"] = ("transformers", "vllm")  # the conversations at a time
        ignored = {}
        for name, engines in read_by.items():
            if getattr(self, name) != defaults[name] and self.engine not in engines:
                ignored[name] = engines
        return ignored

    @property
    def calls_tools(self) -> bool:
        """Whether completions may have several turns: with tools, or in an environment (`module:attribute`)."""
        names_environment = any(":" in spec and "=" not in spec for spec in self.benchmark_specs)
        return bool(self.tools) or names_environment

    @property
    def benchmark_specs(self) -> list[str]:
        """The benchmarks, each as [`~benchmarks.load_benchmark`] takes it."""
        return _comma_separated(self.benchmarks)

    @property
    def ks(self) -> list[int]:
        """The values of k, without repetition, from the smallest to the largest."""
        assert self.k is not None  # set by `__post_init__`
        return sorted({int(k) for k in _comma_separated(self.k)})

    def prompt_of(self, problem: str | list, benchmark: "LoadedBenchmark | None" = None) -> str | list:
        """Build the prompt of a problem, with the instruction of its benchmark unless the user sets one."""
        instruction = self.prompt_instruction
        is_prompt = False
        if benchmark is not None:
            instruction = instruction_for(benchmark, self.prompt_instruction)
            is_prompt = benchmark.is_prompt
        return prompt_of(problem, is_prompt=is_prompt, instruction=instruction, system_prompt=self.system_prompt)

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` of the model, its configuration, tokenizer, and processor."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    @property
    def sampling(self) -> SamplingSettings:
        """The settings that change the text of a completion."""
        return SamplingSettings(self.temperature, self.top_p, self.top_k, self.max_new_tokens)


def read_evaluation(argv: Sequence[str]) -> tuple[EvaluationArguments, VerificationArguments]:
    """Read `--config RECIPE.yaml [--key value ...]`; raises a `ValueError` for an unknown, missing, or illegal key."""
    settings = read_settings(argv)
    values = typed_values(settings, (EvaluationArguments, VerificationArguments), "pacs-trl evaluate")
    set_environment(settings)
    evaluation_values = {declared.name: values[declared.name] for declared in fields(EvaluationArguments)}
    verification_values = {declared.name: values[declared.name] for declared in fields(VerificationArguments)}
    return EvaluationArguments(**evaluation_values), VerificationArguments(**verification_values)


def _comma_separated(entries: str | Sequence[Any]) -> list[str]:
    """Return the entries of text with commas between them, or of a list, which may have such texts."""
    text = entries if isinstance(entries, str) else ",".join(map(str, entries))
    return [entry.strip() for entry in text.split(",")]
