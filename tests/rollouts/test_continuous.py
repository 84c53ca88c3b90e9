"""Continuous rollouts: which groups are trained, when, and with which weights; nothing is lost or trained twice.

The worker is scripted here: it delivers groups in an order that the test chooses. That of TRL is tested in
test_rollout_worker.py, and with a real server in tests/vllm_cpu.
"""

import copy
import itertools
import logging
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.models import LORA, load_weights, tiny_model
from support.rollouts import addition_dataset
from support.runs import Recorder, build_trainer
from support.scripted_worker import play_worker, server_of
from support.vllm_server import server_settings
from transformers import TrainerCallback

from pacs_trl import GRPOTrainer, MaxRLTrainer, PACSTrainer, REALTrainer, RLOOTrainer
from pacs_trl.errors import FailedRun
from pacs_trl.rollouts import server_connection
from pacs_trl.rollouts.prompt_order import indices_of_generation
from pacs_trl.rollouts.rollout_worker import GradedGroup


SETTINGS = {"rollout_schedule": "continuous", "max_staleness": 2, "save_strategy": "steps", "save_steps": 1}
NUM_PROMPTS, GROUPS_PER_STEP = 12, 2
ADAPTERS = {"vllm_sync_adapter": True, "save_strategy": "no", "optim": "adamw_torch", "learning_rate": 3e-2}


class Taken(TrainerCallback):
    """Positions that each optimizer step has trained."""

    def __init__(self):
        self.positions: list[list[int]] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.positions.append([group.position for group in self.trainer._source._taken])


@pytest.fixture
def worker(monkeypatch):
    """The class of workers of this test."""
    return play_worker(monkeypatch.setattr)


def trainer_of(directory, server, trainer_class=None, callbacks=(), more=None, model=None, **settings):
    taken = Taken()
    more = {"train_dataset": addition_dataset(NUM_PROMPTS), "callbacks": [taken, *callbacks], **(more or {})}
    trainer = build_trainer(
        directory,
        model=model or tiny_model(),
        trainer_class=trainer_class,
        more=more,
        **(SETTINGS | server_settings(server.url) | settings),
    )
    taken.trainer = trainer
    return trainer, taken


@pytest.mark.parametrize(
    "trainer_class",
    [
        GRPOTrainer,
        *(pytest.param(c, marks=pytest.mark.slow) for c in (PACSTrainer, RLOOTrainer, MaxRLTrainer, REALTrainer)),
    ],
)
def test_each_prompt_of_an_epoch_is_trained_once_in_the_order_of_a_batch(tmp_path, worker, trainer_class):
    """The engine's log-probs are those that the update refers to."""
    rollouts = []
    with server_of(tiny_model()) as server:
        trainer, taken = trainer_of(tmp_path, server, trainer_class, num_train_epochs=1, max_steps=-1)
        take = trainer._generate_rollouts
        trainer._generate_rollouts = lambda inputs: rollouts.append(take(inputs)) or rollouts[-1]
        trainer.train()
    assert taken.positions == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    order = trainer._source._prompt_order()
    batches = [indices_of_generation(trainer, number)[:: trainer.num_generations] for number in range(12)]
    assert [order[position] for position in range(24)] == [index for batch in batches for index in batch]
    for step, step_rollouts in enumerate(rollouts):
        for i, rollout in enumerate(step_rollouts):
            position = taken.positions[step][i // 4]
            (name,) = trainer.update.logps_of_generating_policy
            assert np.allclose(getattr(rollout, name), -5.5 - position / 100)
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert [log["share"] for log in logs] == [0.25] * 6


def test_generation_runs_ahead_by_the_largest_staleness(tmp_path, worker):
    """With those in training, `max_staleness + 1` steps need all groups, or the steps that remain; none is dropped."""
    sizes = []

    class Measure(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            source = trainer._source
            for _ in range(20):
                source._receive(0)
            sizes.append(len(source.waiting) + len(source._worker.started))

    with server_of(tiny_model()) as server:
        trainer, _ = trainer_of(tmp_path, server, callbacks=[Measure()], max_steps=6, save_strategy="no")
        trainer.train()
    logs = [log for log in trainer.state.log_history if "async/dropped_groups" in log]
    assert sum(log["async/dropped_groups"] for log in logs) == 0
    assert max(log["async/largest_lag"] for log in logs) == 2
    assert sizes == [4, 4, 4, 4, 2, 0]


def test_old_groups_are_dropped_and_counted_and_their_prompts_not_repeated(tmp_path, worker):
    worker.version = staticmethod(lambda position, now: 0 if position in (7, 8) else now)
    with server_of(tiny_model()) as server:
        trainer, taken = trainer_of(tmp_path, server, max_steps=5)
        trainer.train()
    assert sum(taken.positions, []) == [0, 1, 2, 3, 4, 5, 6, 9, 10, 11]
    logs = [log for log in trainer.state.log_history if "async/dropped_groups" in log]
    assert sum(log["async/dropped_groups"] for log in logs) == 2
    assert max(log["async/largest_lag"] for log in logs) <= 2


def test_a_group_is_as_old_as_its_oldest_sampled_token(worker):
    group = SimpleNamespace(versions=[[5, 5, -1], [-1, 4, 5]])
    assert GradedGroup.oldest_version.fget(group) == 4
    assert GradedGroup.num_mixed.fget(group) == 1


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_resumed_run_trains_what_was_not_trained(tmp_path, worker, step):
    """Groups that were finished are restored, and those that were being decoded are generated again, first."""
    worker.order = staticmethod(lambda started: started[len(started) // 2])
    with server_of(tiny_model()) as server:
        first, before = trainer_of(tmp_path, server, max_steps=step)
        first.train()
        finished = [group.position for group in first._source.waiting]
        trained = sum(before.positions, [])
        worker.generated.clear()
        second, after = trainer_of(tmp_path, server, num_train_epochs=1, max_steps=-1)
        second.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert sorted(trained + sum(after.positions, [])) == list(range(12))
    assert not {*finished} & {*worker.generated}
    assert not {*trained} & {*worker.generated}


def test_all_weights_reach_the_server_after_every_step(tmp_path, worker):
    check_weights(tmp_path, worker)


def test_merged_lora_reaches_the_server_after_every_step(tmp_path, worker):
    check_weights(tmp_path, worker, lora=LORA)


def check_weights(tmp_path, worker, lora=None):
    class Compare(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            versions.append(server.version.partition("/")[2])
            sent.append(dict(server.weights))

    versions: list[str] = []
    sent: list[dict] = []
    recorder = Recorder()
    with server_of(tiny_model()) as server:
        callbacks = [recorder, Compare()]
        trainer, _ = trainer_of(
            tmp_path, server, callbacks=callbacks, more={"peft_config": lora}, max_steps=3, save_strategy="no"
        )
        trainer.train()
    assert versions == ["0", "1", "2"]
    assert not server.paused
    for weights, server_weights in zip(recorder.weights, sent, strict=True):
        if lora is None:
            expected = weights
        else:
            load_weights(trainer.model, weights)
            merged = copy.deepcopy(trainer.model).merge_and_unload()
            expected = dict(merged.named_parameters())
        assert server_weights.keys() == expected.keys()
        assert all(torch.allclose(server_weights[name], weight, atol=1e-6) for name, weight in expected.items())


class RecordedTransfer:
    """What TRL's transfer by NCCL is asked for. It reads weights in a thread, and may fail before the last ones."""

    calls: list[str] = []
    sent: list[list[str]] = []
    failure: Exception | None = None

    def __init__(self, vllm_client, weight_update_info):
        self.info = weight_update_info

    def __getattr__(self, name):
        return lambda: self.calls.append(name)

    def send_weights(self, iterator):
        self.calls.append("send_weights")
        number = 3 if self.failure else len(self.info["names"])
        weights: list[tuple[str, torch.Tensor]] = []
        thread = threading.Thread(target=lambda: weights.extend(itertools.islice(iterator, number)))
        thread.start()
        thread.join()
        if self.failure:
            raise self.failure
        self.sent.append([name for name, _ in weights])
        assert self.sent[-1] == self.info["names"]
        assert [list(weight.shape) for _, weight in weights] == self.info["shapes"]
        assert (
            {str(weight.dtype) for _, weight in weights}
            == {"torch.float32"}
            == {f"torch.{name}" for name in self.info["dtype_names"]}
        )
        assert list(iterator) == []


def test_a_server_elsewhere_gets_all_weights_by_nccl_while_it_is_paused(tmp_path, worker, monkeypatch):
    """TRL's transfer itself needs GPUs."""
    monkeypatch.setattr(RecordedTransfer, "calls", [])
    monkeypatch.setattr(server_connection, "shares_memory", lambda config, url: False)
    monkeypatch.setattr(server_connection, "WeightTransferClient", RecordedTransfer)
    read = []
    with server_of(tiny_model()) as server:
        settings = {"startup_check": False, "save_strategy": "no"}
        trainer, taken = trainer_of(tmp_path, server, max_steps=2, **settings)
        trainer.train()
        assert RecordedTransfer.calls == ["init_weight_transfer", *["pause", "send_weights", "resume"] * 2, "destroy"]
        assert RecordedTransfer.sent[0] == [name for name, _ in tiny_model().named_parameters()]
        monkeypatch.setattr(RecordedTransfer, "failure", RuntimeError("Weight sync failed"))
        trainer, _ = trainer_of(tmp_path, server, max_steps=2, **settings)
        iterate = trainer.vllm_generation._iter_named_params
        trainer.vllm_generation._iter_named_params = lambda: (read.append(name) or (name, w) for name, w in iterate())
        with pytest.raises(FailedRun, match="did not take the weights after optimizer step 0 .*Weight sync failed"):
            trainer.train()
    assert taken.positions == [[0, 1], [2, 3]]
    assert read == RecordedTransfer.sent[0] * 2  # for the announcement, and though the transfer has failed


@pytest.mark.parametrize("oldest_is_in_use", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_step_has_an_adapter_on_a_server_that_is_not_paused(tmp_path, worker, oldest_is_in_use):
    """Those that no turn names are unloaded."""

    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            shared = trainer._source._worker.shared
            shared.oldest = 0 if oldest_is_in_use else shared.value
            loaded.append([int(name.rpartition("-v")[2]) for name in server.loaded])

    loaded: list[list[int]] = []
    recorder = Recorder()
    with server_of(tiny_model()) as server:
        callbacks, more = [recorder, Note()], {"peft_config": LORA}
        trainer, taken = trainer_of(tmp_path, server, callbacks=callbacks, more=more, max_steps=4, **ADAPTERS)
        trainer.train()
        client = trainer.vllm_generation.vllm_client
        assert list(server.loaded) == [client.model] == [f"{trainer._source._server.lora_name}-v3"]
    if oldest_is_in_use:
        assert loaded == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    else:
        assert loaded == [[0], [0, 1], [1, 2], [2, 3]]
    assert not {"/pause", "/collective_rpc"} & {*server.calls}
    assert server.version.endswith("/3")
    assert taken.positions == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert len(server.adapters) == 4
    for version, (name, adapter) in enumerate(server.adapters.items()):
        assert name.endswith(f"-v{version}")
        expected = {key.replace(".default", ""): weight for key, weight in recorder.weights[version].items()}
        assert adapter.keys() == expected.keys()
        assert all(torch.equal(adapter[key], weight) for key, weight in expected.items())


def test_a_server_that_does_not_use_an_adapter_stops_the_run(tmp_path, worker):
    with server_of(tiny_model()) as server:
        prompt_logps = server.prompt_logps
        server.prompt_logps = lambda ids, directory: prompt_logps(ids, None)
        trainer, _ = trainer_of(tmp_path, server, more={"peft_config": LORA}, max_steps=4, **ADAPTERS)
        with pytest.raises(FailedRun, match="does not generate with the trained adapter"):
            trainer.train()
        server.answers["/v1/load_lora_adapter"] = 500
        trainer, _ = trainer_of(tmp_path, server, more={"peft_config": LORA}, max_steps=4, **ADAPTERS)
        with pytest.raises(FailedRun, match="did not load the adapter after optimizer step 0 .*500.*--enable-lora"):
            trainer.train()


def test_a_server_with_other_weights_than_it_was_sent_stops_the_run(tmp_path, worker):
    with server_of(tiny_model()) as server:
        trainer, _ = trainer_of(tmp_path, server, max_steps=4, save_strategy="no")
        load = server._load_weights
        server._load_weights = lambda weights: load(iter([])) if server.num_updates == 2 else load(weights)
        with pytest.raises(FailedRun, match="does not generate with the trained weights"):
            trainer.train()
    assert (tmp_path / f"checkpoint-{trainer.state.global_step}").is_dir()


def test_a_server_that_fails_while_it_takes_weights_stops_the_run_without_a_traceback(tmp_path, worker, caplog):
    """The message has the command that starts another one for this model."""
    model = tiny_model().to(torch.bfloat16)
    with server_of(model) as server:
        server.answers = {"/collective_rpc": 500}
        server.info["vllm_config"]["model_config"]["dtype"] = "torch.bfloat16"
        trainer, _ = trainer_of(tmp_path, server, model=model, max_steps=1, startup_check=False)
        message = "did not take the weights after optimizer step 0 .*has status 500.*--dtype bfloat16"
        with pytest.raises(FailedRun, match=message):
            trainer.train()
    assert not [record for record in caplog.records if record.exc_info]


def test_a_server_that_was_left_paused_is_resumed_with_fresh_weights(tmp_path, worker):
    with server_of(tiny_model()) as server:
        server.paused = True
        trainer, taken = trainer_of(tmp_path, server, max_steps=1)
        trainer.train()
        assert not server.paused
    assert server.version.endswith("/0")
    assert taken.positions == [[0, 1]]


@pytest.mark.parametrize("kind", [pytest.param("restarted", marks=pytest.mark.slow), "dead"])
def test_groups_since_the_last_check_of_a_failed_server_are_generated_again(tmp_path, worker, kind):
    """The state after the last optimizer step is saved, without groups that another server may have generated."""

    class Fail(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                source = trainer._source
                assert source._server.watch.check() is None
                source._receive(0)
                source.waiting[-1].enqueued_at = time.time() + 60
                late.append(source.waiting[-1].position)
                server.version = "default"
                if kind == "dead":
                    server.answers = {"/weight_info": 503, "/pause": 503, "/health": 503}

    late: list[int] = []
    with server_of(tiny_model()) as server:
        trainer, before = trainer_of(tmp_path, server, callbacks=[Fail()], max_steps=6)
        started = time.monotonic()
        with pytest.raises(FailedRun, match="after optimizer step 2.*checkpoint-2.*resume_from_checkpoint last"):
            trainer.train()
        assert time.monotonic() - started < 60
        server.answers = {}
        assert late[0] not in [group.position for group in trainer._source.waiting]
        worker.generated.clear()
        again, after = trainer_of(tmp_path, server, max_steps=6)
        again.train(resume_from_checkpoint=True)
    assert late[0] in worker.generated
    assert sorted(sum(before.positions + after.positions, [])) == list(range(12))


def test_a_worker_that_fails_stops_the_run_after_the_last_step(tmp_path, worker):
    class Fail(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer._source._worker.failure = ("ValueError", "The reward function 'f' returned text.")

    with server_of(tiny_model()) as server:
        trainer, _ = trainer_of(tmp_path, server, callbacks=[Fail()], max_steps=3)
        with pytest.raises(FailedRun, match="rollout worker failed after optimizer step 1.*'f' returned text"):
            trainer.train()
    assert (tmp_path / "checkpoint-1").is_dir()


def test_a_worker_that_does_not_start_stops_the_run(tmp_path, worker):
    def start(self):
        raise RuntimeError("its process exited")

    worker.start = start
    with server_of(tiny_model()) as server:
        trainer, _ = trainer_of(tmp_path, server, max_steps=1)
        with pytest.raises(FailedRun, match="rollout worker failed to start .*RuntimeError: its process exited"):
            trainer.train()


def test_what_fails_after_the_signal_that_stops_a_run_is_no_failure(tmp_path, worker):
    """Of a scheduler, which also ends the worker that is being started, or the server."""

    def start(self):
        trainer.control.should_training_stop = True
        raise RuntimeError("its process exited")

    worker.start = start
    with server_of(tiny_model()) as server:
        trainer, taken = trainer_of(tmp_path, server, max_steps=1)
        trainer.train()
    assert taken.positions == []


def test_a_signal_that_stops_the_wait_saves_the_last_step_and_how_many_groups_were_dropped(tmp_path, worker):
    """A resumed run counts those that were dropped before the stop."""
    worker.delivers = True

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step < 2:
                return
            source = trainer._source
            source._receive(0)
            for group in source.waiting:
                group.versions = [[0] * len(versions) for versions in group.versions]
            waiting.extend(group.position for group in source.waiting)
            source._worker.delivers = False
            threading.Timer(0.1, setattr, (control, "should_training_stop", True)).start()

    waiting: list[int] = []
    with server_of(tiny_model()) as server:
        settings = {"max_staleness": 1, "save_strategy": "no"}
        trainer, before = trainer_of(tmp_path, server, callbacks=[Stop()], max_steps=4, **settings)
        trainer.train()
        again, after = trainer_of(tmp_path, server, max_steps=3, **settings)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert waiting == [4]
        logs = [log for log in again.state.log_history if "async/dropped_groups" in log]
        assert [log["async/dropped_groups"] for log in logs] == [0, 0, 1]
        assert before.positions + after.positions == [[0, 1], [2, 3], [5, 6]]
        again._source._taken_at = again.state.global_step
        again._source.put_back()
        assert again._source.state()["num_dropped"] == 1


def test_evaluation_generates_with_the_current_weights(tmp_path, worker, caplog):
    """Also before and after a run, where other weights on the server, or its end, are no failure."""
    with server_of(tiny_model()) as server:
        more = {"eval_dataset": addition_dataset(4)}
        settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no", "num_generations_eval": 2}
        trainer, _ = trainer_of(tmp_path, server, more=more, max_steps=2, **settings)
        trainer.evaluate()
        assert server.version.endswith("/0")
        memory = trainer._source._server._transfer._fd
        trainer.train()
        with pytest.raises(OSError):
            os.fstat(memory)
        assert server.version.endswith("/2")
        logs = [log for log in trainer.state.log_history if "eval_reward" in log]
        assert len(logs) == 2
        trainer.evaluate()
        server.version = "default"
        time.sleep(0.1)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
