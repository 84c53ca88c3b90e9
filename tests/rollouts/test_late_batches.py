"""Generation with a fixed lag: the number of a batch decides what it is generated with, whoever dies in between."""

import asyncio
import os
import random
import signal
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from support.forked_engine import forked_engine
from support.late_runs import check_logps, trainer_of
from support.models import TOKENIZER, assert_same_models, tiny_model, trainable_weights
from support.processes import on_two, start
from support.rollouts import addition_dataset, digit_reward
from support.runs import Recorder
from support.seeds import shifted
from support.vllm_server import LoopbackVLLM, play_installed, server_settings
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

from pacs_trl import GRPOTrainer, PACSTrainer
from pacs_trl.errors import FailedRun
from pacs_trl.rollouts import late_batches
from pacs_trl.rollouts.checkpoint_files import last_checkpoint
from pacs_trl.rollouts.engine_process import EngineProcess
from pacs_trl.rollouts.server_requests import ServerRequests
from pacs_trl.rollouts.stop_on_signal import StopOnSignal


@pytest.mark.parametrize(
    ("lag", "trainer_class", "lora", "more"),
    [
        (1, None, False, {}),
        (2, GRPOTrainer, False, {"stale_logps": "engine"}),
        pytest.param(2, None, True, {"fast_generation": True}, marks=pytest.mark.slow),
        (2, None, True, {"fast_generation": True, "stale_logps": "engine"}),
    ],
    ids=str,
)
def test_the_lag_decides_which_weights_generate(tmp_path, lag, trainer_class, lora, more):
    """The engine's log-probs are those of the weights from `lag` batches before, which the update refers to."""
    recorder = Recorder()
    settings = {"rollout_lag": lag, "save_strategy": "no", "max_steps": 8, **more}
    with forked_engine():
        trainer = trainer_of(tmp_path, trainer_class, lora, [recorder], **settings)
        trainer.train()
    check_logps(trainer, recorder, lag)
    logs = [log for log in trainer.state.log_history if "async/lag_updates" in log]
    assert [log["async/lag_updates"] for log in logs] == [2.0 * min(n, lag) for n in range(4)]
    gaps = [log["sampling/sampling_logp_difference/mean"] for log in logs]
    assert gaps[0] < 1e-4 < 1e-2 < min(gaps[1:])
    assert all(set(r.group for r in kept).isdisjoint(r.group for r in trainer.kept[0]) for kept in trainer.kept[1:])


def test_a_head_that_is_untied_in_memory_generates(tmp_path):
    """As after merging an adapter with a head of its own, while the configuration says that weights are shared."""
    model, recorder = tiny_model(), Recorder()
    model.lm_head.weight = nn.Parameter(-model.lm_head.weight.detach())
    with forked_engine():
        trainer = trainer_of(tmp_path, callbacks=[recorder], model=model, save_strategy="no", max_steps=4)
        trainer.train()
    check_logps(trainer, recorder, 1)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_float32_generates_as_it_trains(tmp_path, tied):
    """The engine's log-probs, as they are sampled, are those of the trainer but for rounding of the layers."""
    model = tiny_model()
    model.config.tie_word_embeddings = tied
    model = type(model)(model.config).to(torch.bfloat16)
    settings = {"cast_lm_head_to_fp32": True, "stale_logps": "engine", "max_steps": 2, "save_strategy": "no"}
    with forked_engine():
        trainer = trainer_of(tmp_path, model=model, **settings)
        trainer.train()
    log = next(log for log in trainer.state.log_history if "async/lag_updates" in log)
    assert log["sampling/sampling_logp_difference/mean"] < 0.02


async def two_turns(prompts, generate):
    """A rollout function whose completions are two turns with tokens of an environment in between."""
    prompt_ids = TOKENIZER.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)
    halves = await asyncio.gather(generate(prompt_ids[::2]), generate(prompt_ids[1::2]))
    first = {name: [half[name][i] for i in range(len(prompts) // 2) for half in halves] for name in halves[0]}
    context = [[*ids, *turn, 7, 8] for ids, turn in zip(prompt_ids, first["completion_ids"], strict=True)]
    second = await generate(context)
    both = list(zip(first["completion_ids"], second["completion_ids"], strict=True))
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [[*a, 7, 8, *b] for a, b in both],
        "logprobs": [[*a, 0.0, 0.0, *b] for a, b in zip(first["logprobs"], second["logprobs"], strict=True)],
        "env_mask": [[1] * len(a) + [0, 0] + [1] * len(b) for a, b in both],
        "turns": [2] * len(prompts),
    }


def reward_of_turns(completions, turns, **kwargs):
    return [turn / 2 * reward for turn, reward in zip(turns, digit_reward(completions), strict=True)]


@pytest.mark.slow
def test_runs_with_an_asynchronous_rollout_function_resume(tmp_path):
    recorder, settings = Recorder(), {"rollout_func": two_turns, "reward": reward_of_turns, "rollout_lag": 2}
    settings |= {"max_steps": 8}
    with forked_engine():
        straight = trainer_of(tmp_path / "a", callbacks=[recorder], **settings)
        resumed = trainer_of(tmp_path / "b", **settings)
        straight.train()
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert_same_models(straight, resumed)
    check_logps(straight, recorder, 2)
    for again, rollout in zip(resumed.kept[-1], straight.kept[-1], strict=True):
        assert (again.completion_ids == rollout.completion_ids).all()


class Kill(TrainerCallback):
    """kill -9 some seconds after the optimizer step `at` began: while engine or trainer waits, works, or saves."""

    def __init__(self, at: int, seconds: float):
        self.at, self.seconds = at, seconds

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def train_and_kill(directory, callbacks, resume, settings):
    with forked_engine():
        trainer = trainer_of(directory, callbacks=callbacks, **settings)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()


ONCE_MORE = [pytest.param(1, 9, 4, marks=pytest.mark.slow), pytest.param(2, 50, 20, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("lag", "steps", "times"), [(2, 9, 4), *ONCE_MORE])
@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_ends_with_the_same_weights(tmp_path, lag, steps, times):
    settings = {"rollout_lag": lag, "max_steps": steps}
    with forked_engine():
        straight = trainer_of(tmp_path / "straight", **settings)
        straight.train()
    moments = random.Random(shifted(times))
    kills = [[Kill(at, moments.random() / 10)] for at in sorted(moments.sample(range(1, steps - 4), times))]
    directory, codes = tmp_path / "killed", []
    for kill in [*kills, []]:
        process = start(
            train_and_kill, directory, kill, last_checkpoint(directory) is not None, settings, output=tmp_path / "out"
        )
        process.join(120)
        codes.append(process.exitcode)
        assert codes[-1] in (-signal.SIGKILL, 0), (tmp_path / "out").read_text()[-3000:]
    assert -signal.SIGKILL in codes and codes[-1] == 0
    killed_weights = trainable_weights(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
    assert all(torch.equal(weight, killed_weights[name]) for name, weight in trainable_weights(straight.model).items())


def train_and_resume(directory, settings):
    if "vllm_mode" in settings:
        play_installed(setattr)
    with forked_engine():
        straight = trainer_of(directory / "straight", per_device_train_batch_size=4, **settings)
        straight.train()
        resumed = trainer_of(directory / "resumed", per_device_train_batch_size=4, **settings)
        resumed.train(resume_from_checkpoint=str(directory / "straight" / "checkpoint-3"))
    assert_same_models(straight, resumed)
    prompts = [tuple(r.prompt_ids) for rollouts in straight.kept for r in rollouts]
    assert len(set(prompts)) == 3 * 2, "each process has its own prompts"


@pytest.mark.distributed
@pytest.mark.parametrize("engine", ["process", "server"])
@pytest.mark.slow
def test_two_processes_resume_with_a_seed_per_request(tmp_path, model_path, engine):
    with LoopbackVLLM(model_path) as server:
        server.wait = lambda number: time.sleep(0.5 * (number % 2))  # slow for one of the processes
        settings = {"model": model_path, **server_settings(server.url)} if engine == "server" else {}
        on_two(train_and_resume, tmp_path, settings, outputs=tmp_path, seconds=300)
        assert len(set(server.seeds)) == (3 * 2 if settings else 0), "each request of each process has its own seed"


class EndEngine(TrainerCallback):
    """Send signals to the engine, or after it to this process, in the third optimizer step."""

    def __init__(self, trainer, to_engine, to_self=None):
        self.trainer, self.to_engine, self.to_self = trainer, to_engine, to_self

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 2:
            os.kill(self.trainer._source.engine.process.pid, self.to_engine)
            if self.to_self is not None:
                threading.Timer(0.2, os.kill, (os.getpid(), self.to_self)).start()


@pytest.mark.slow
def test_an_engine_that_dies_stops_the_run_after_a_step(tmp_path):
    """Batches that it did not finish are generated after the resume, with weights from the checkpoint."""
    with forked_engine():
        straight = trainer_of(tmp_path / "straight", rollout_lag=2, max_steps=10)
        straight.train()
        stopped = trainer_of(tmp_path / "stopped", rollout_lag=2, max_steps=10, save_strategy="no")
        stopped.add_callback(EndEngine(stopped, signal.SIGKILL))
        with pytest.raises(FailedRun, match=r"engine process stopped after optimizer step \d .*checkpoint-\d; fix"):
            stopped.train()
        resumed = trainer_of(tmp_path / "stopped", rollout_lag=2, max_steps=10, save_strategy="no")
        resumed.train(resume_from_checkpoint=True)
        assert_same_models(straight, resumed)
        other = trainer_of(tmp_path / "stopped", rollout_lag=2, max_steps=10, seed=shifted(42))
        other.train_dataset = addition_dataset(24).select(range(12, 24))
        with pytest.raises(FailedRun, match="prompts of generation batch"):
            other.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-3"))
        lag_1 = trainer_of(tmp_path / "other", rollout_lag=1, max_steps=10)
        with pytest.raises(ValueError, match="rollout_lag: 2 in the checkpoint, 1 now"):
            lag_1.train(resume_from_checkpoint=last_checkpoint(tmp_path / "stopped"))


def test_ctrl_c_while_the_engine_does_not_answer(tmp_path, monkeypatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with forked_engine():
            trainer = trainer_of(tmp_path, max_steps=20, save_strategy="no")
            trainer.add_callback(EndEngine(trainer, signal.SIGSTOP, signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
        assert trainer._source.engine.process.exitcode == -signal.SIGKILL
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_that_a_callback_ends_while_the_engine_generates_can_be_evaluated(tmp_path, monkeypatch):
    class EndRun(EndEngine):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3

    monkeypatch.setattr(late_batches, "PATIENCE", 0.2)
    with forked_engine():
        trainer = trainer_of(tmp_path, max_steps=20, save_strategy="no")
        trainer.add_callback(EndRun(trainer, signal.SIGSTOP))
        trainer.train()
        assert trainer._source.engine.process.exitcode == -signal.SIGKILL
        assert "eval_reward" in trainer.evaluate(addition_dataset(4))


class CtrlC(TrainerCallback):
    """Send Ctrl-C at an event of the optimizer step `at`."""

    def __init__(self, event: str, at: int):
        self.at = at
        setattr(self, event, self.send)

    def send(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("engine", "event", "at", "saved"),
    [
        (EngineProcess, "on_pre_optimizer_step", 2, 3),
        (EngineProcess, "on_step_begin", 4, 4),
        (ServerRequests, "on_step_begin", 4, 4),
    ],
)
def test_ctrl_c_does_not_wait_for_a_batch(tmp_path, monkeypatch, model_path, engine, event, at, saved):
    """The first one, in training and while the third batch is waited for, which the engine never generates."""
    before, numbers = signal.signal(signal.SIGINT, signal.default_int_handler), []

    def generate_two(self, *request, generate=engine.generate):
        numbers.append(request)
        return generate(self, *request) if len(numbers) < 3 else threading.Event().wait()

    with LoopbackVLLM(model_path) as server, forked_engine(), closing(StopOnSignal()) as stopping:
        settings = {"save_strategy": "no"}
        if engine is ServerRequests:
            play_installed(monkeypatch.setattr)
            settings |= {"model": model_path, **server_settings(server.url)}
        straight = trainer_of(tmp_path / "straight", **settings)
        straight.train()
        with monkeypatch.context() as patched:
            patched.setattr(engine, "generate", generate_two)
            patched.setattr(late_batches, "PATIENCE", 0.0)
            stopped = trainer_of(tmp_path / "stopped", callbacks=[stopping, CtrlC(event, at)], **settings)
            stopped.train()
        assert stopping.stopped == signal.SIGINT and stopped.state.global_step == saved and len(numbers) == 3
        stopping.close()
        assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
        resumed = trainer_of(tmp_path / "stopped", **settings)
        resumed.train(resume_from_checkpoint=True)
    assert_same_models(straight, resumed)


class NotePid(TrainerCallback):
    def __init__(self, trainer, file: Path):
        self.trainer, self.file = trainer, file

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.file.write_text(str(self.trainer._source.engine.process.pid))
        os.kill(os.getpid(), signal.SIGKILL)


def train_with_an_interpreter(directory, file):
    trainer = trainer_of(directory, bf16=True)
    trainer.add_callback(NotePid(trainer, file))
    trainer.train()


def test_the_engine_ends_with_a_trainer_that_is_killed(tmp_path):
    """The process as users start it, with a new interpreter and in bfloat16."""
    process = start(train_with_an_interpreter, tmp_path, tmp_path / "pid", output=tmp_path / "out")
    process.join(300)
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "out").read_text()[-3000:]
    status = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    while status.exists() and status.read_text().split()[2] != "Z":  # of a parent that reaps nothing
        time.sleep(0.1)


def test_a_server_generates_beside_training_and_its_failure_stops_the_run(tmp_path, model_path, monkeypatch):
    """The request for the next batch is sent before training; an evaluation waits for it. A server that fails stops
    the run, and what it had not answered is requested again."""
    play_installed(monkeypatch.setattr)
    with LoopbackVLLM(model_path) as server:

        def run(directory, resume=None, **settings):
            arguments = server_settings(server.url) | {"per_device_eval_batch_size": 4} | settings
            trainer = trainer_of(tmp_path / directory, model=model_path, **arguments)
            trainer.train(resume_from_checkpoint=resume)
            return trainable_weights(trainer.model)

        expected = run("straight", eval_strategy="steps", eval_steps=3)
        in_training = server.seeds[:3]
        assert len(set(server.seeds)) == len(server.seeds) and server.num_updates >= 3
        server.seeds.clear()
        resumed = run("resumed", resume=str(tmp_path / "straight" / "checkpoint-3"))
        assert all(torch.equal(expected[name], resumed[name]) for name in expected)
        server.fail_generation = len(server.seeds) + 1
        with pytest.raises(FailedRun, match="vLLM server at .* after optimizer step 2 .*--resume_from"):
            run("stopped", save_strategy="no")
        server.dead, server.fail_generation = False, None
        server.seeds.clear()
        run("stopped", resume=True)
        assert server.seeds == in_training[1:]


def test_a_server_that_fails_when_it_gets_weights_does_not_lose_the_batch_that_has_arrived(
    tmp_path, model_path, monkeypatch
):
    """The second batch has arrived when the server gets the weights for the third one. It is in the checkpoint, so the
    run that resumes trains on it: not on one with newer weights."""
    play_installed(monkeypatch.setattr)
    with LoopbackVLLM(model_path) as server:

        class FailingRequests(ServerRequests):
            def write_weights(self, weight_copy, weights):
                server.dead = self.trainer.state.global_step == 2
                super().write_weights(weight_copy, weights)

        def build(directory):
            settings = server_settings(server.url) | {"save_strategy": "no"}
            return trainer_of(tmp_path / directory, model=model_path, **settings)

        straight = build("straight")
        straight.train()
        seeds, server.seeds = server.seeds, []
        with monkeypatch.context() as patched:
            patched.setattr(late_batches, "ServerRequests", FailingRequests)
            with pytest.raises(FailedRun, match="stopped answering after optimizer step 2"):
                build("stopped").train()
        server.dead = False
        resumed = build("stopped")
        resumed.train(resume_from_checkpoint=True)
        assert server.seeds == seeds
        assert_same_models(straight, resumed)


@pytest.mark.parametrize("trainer_class", [PACSTrainer, GRPOTrainer])
@pytest.mark.slow
def test_recomputed_logps_are_those_of_the_weights_that_the_server_had(
    tmp_path, model_path, monkeypatch, trainer_class
):
    """They are computed with a copy of the weights that the server had, also after a resume."""
    play_installed(monkeypatch.setattr)
    with LoopbackVLLM(model_path) as server:

        def build(directory, **more):
            settings = server_settings(server.url) | {"stale_logps": "recompute", "max_steps": 8}
            return trainer_of(tmp_path / directory, trainer_class, model=model_path, **settings, **more)

        recorder = Recorder()
        straight = build("straight", callbacks=[recorder])
        straight.train()
        for step in (3, 4):
            resumed = build(f"resumed-{step}")
            resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{step}"))
            assert_same_models(straight, resumed)
        check_logps(straight, recorder, 1, recomputed=True)
