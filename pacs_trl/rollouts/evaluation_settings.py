"""Settings of pass@k on benchmarks during training. They load without the training stack, as `pacs-trl plan` needs."""

from dataclasses import dataclass, fields

from ..evaluation.arguments import DEFAULT_KS
from ..evaluation.benchmarks import checked_name
from ..settings import bounded


@dataclass
class EvaluationSettings:
    """
    Settings of pass@k on benchmarks during training; a base class of the training configurations. `eval_strategy`,
    `eval_steps`, and `eval_on_start` say when; `max_completion_length` bounds the completions.

    Parameters:
        eval_benchmarks (`list[str]`, *optional*): Benchmarks in the notation of `pacs-trl evaluate`. In a recipe,
            their prompts have the instruction and system prompt of training.
        eval_max_problems (`int`, *optional*): Use only the first problems of each benchmark.
        eval_num_samples (`int`): Completions of each problem. k is 1, 4, 8, 16, 32, and 64 up to this number.
        eval_temperature (`float`, *optional*): Sampling temperature on benchmarks, by default that of training; 0 is
            greedy decoding.
        eval_top_p (`float`, *optional*): Nucleus mass on benchmarks, by default that of training.
    """

    eval_benchmarks: list[str] | None = None
    eval_max_problems: int | None = bounded(None, least=1)
    eval_num_samples: int = bounded(8, least=1)
    eval_temperature: float | None = bounded(None, least=0)
    eval_top_p: float | None = bounded(None, above=0, most=1)

    eval_data = None  # `DataArguments` of a recipe, which prompts are made from; not a field

    def __post_init__(self):
        if isinstance(self.eval_benchmarks, str):
            self.eval_benchmarks = [self.eval_benchmarks]
        if self.eval_benchmarks and self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model = "eval_pass@1"
        best = self.metric_for_best_model or ""
        if best.startswith("eval/"):  # the name in trackers
            self.metric_for_best_model = best = f"eval_{best.removeprefix('eval/')}"
        super().__post_init__()
        for spec in self.eval_benchmarks or ():
            checked_name(spec)
        given = [f.name for f in fields(EvaluationSettings) if getattr(self, f.name) != f.default]
        ks = [str(k) for k in DEFAULT_KS if self.eval_benchmarks and k <= self.eval_num_samples]
        error = None
        if given and not self.eval_benchmarks:
            error = f"{', '.join(given)} would be ignored. Set eval_benchmarks, or remove the key."
        elif self.eval_temperature == 0 and self.eval_num_samples > 1:
            error = "eval_temperature=0 generates equal completions of a problem. Set eval_num_samples: 1."
        elif "pass@" in best and best.rpartition("pass@")[2].partition("_")[0] not in ks:
            error = f"metric_for_best_model={best!r} would not be measured: k is {' or '.join(ks) or 'not measured'} "
            error += f"with eval_num_samples={self.eval_num_samples} and eval_benchmarks={self.eval_benchmarks}."
        if error:
            raise ValueError(error)
