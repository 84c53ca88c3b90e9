"""Failures of what generates beside training, which all processes raise, and the end of a run after one."""

from typing import TYPE_CHECKING, NoReturn

from accelerate.utils import broadcast_object_list

from ..errors import FailedRun
from .adapter_checks import max_lora_rank
from .engine_weights import WrongWeights
from .server_command import serve_command, server_url, training_dtype


if TYPE_CHECKING:
    from .resumable_trainer import ResumableTrainer


class ServerFailure(RuntimeError):
    """Failure of a vLLM server, raised on all processes. `args` are its state, which completes the sentence "The vLLM
    server ...", and the cause: the server's response or the exception."""


class WorkerFailure(ServerFailure):
    """Failure of the rollout worker of `rollout_schedule: continuous` that is none of the server: of a reward function
    or a tool, for example."""


def raise_on_all(failure: tuple[str, str] | None) -> None:
    """Raise a [`ServerFailure`] with these arguments on all processes, which must call this, if the first process has
    a failure."""
    (failure,) = broadcast_object_list([failure], from_process=0)
    if failure is not None:
        raise ServerFailure(*failure)


def stop_without_engine(trainer: "ResumableTrainer", failure: ServerFailure | WrongWeights) -> NoReturn:
    """Save the state after the last optimizer step, and raise a [`FailedRun`], on all processes: the vLLM server, or
    the engine process of a run without vLLM, has failed, or generates with other weights."""
    trainer.undo_step_and_save()
    if isinstance(failure, WrongWeights):
        raise FailedRun(str(failure)) from failure
    args, step = trainer.args, trainer.state.global_step
    if isinstance(failure, WorkerFailure):
        engine = "rollout worker"
        remedy = ""
    elif trainer.use_vllm:
        engine = f"vLLM server at {server_url(args)}"
        remedy = f", start the server if it is down: {_command_of_server(trainer)}"
    else:
        engine = "engine process"
        remedy = " (an error above, or memory)"
    if step > 0:
        saved = f"The state after it is in {args.output_dir}/checkpoint-{step}"
    else:
        saved = "No optimizer step had been taken yet"
    state, cause = failure.args
    raise FailedRun(
        f"The {engine} {state} after optimizer step {step} ({cause}). "
        f"{saved}; fix the problem{remedy} and continue with "
        "`--resume_from_checkpoint last`."
    ) from failure


def _command_of_server(trainer: "ResumableTrainer") -> str:
    model, args = trainer.model, trainer.args
    name = model.name_or_path or "MODEL"
    rank = max_lora_rank(args, model, None)
    return serve_command(name, rank, args, training_dtype(args, model), trainer._longest_sequence)
