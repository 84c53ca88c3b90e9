"""Continuous rollouts without a worker process, whose order of groups a test chooses, and without a model of vLLM."""

import copy
import time
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from peft import PeftModel

from pacs_trl.rollouts import continuous, server_watch, worker_checks
from pacs_trl.rollouts.rollout_worker import GradedGroup
from support.models import TOKENIZER
from support.rollouts import digit_reward
from support.vllm_server import LoopbackVLLM, draw_tokens, play_installed


class ScriptedWorker:
    """
    A worker without a process. `order(started)` returns the group that it finishes next, among the positions that it
    has started; `version(position, now)` the version of its oldest weights.
    """

    order = staticmethod(lambda started: started[0])
    version = staticmethod(lambda position, now: now)
    delivers = True
    generated: list[int] = []  # positions, of all workers of a test
    largest = 0  # number of groups that were started and not taken

    def __init__(self, *, dataset, order, missing, next_position, num_generations, **arguments):
        self.dataset, self.order_of_prompts, self.num_generations = dataset, order, num_generations
        self.arguments = arguments
        self.coming = [*missing, *range(next_position, next_position + 1000)]
        self.started: list[int] = []
        self.num_started = 0
        self.has_failed = False
        self.failure = None
        self.shared = Shared()

    def start(self):
        pass

    def receive(self, timeout):
        new = max(0, self.shared.admitted - self.num_started)
        self.started += self.coming[:new]
        self.coming = self.coming[new:]
        self.num_started += new
        type(self).largest = max(self.largest, len(self.started))
        if not self.started or not self.delivers:
            time.sleep(timeout / 20)
            return []
        position = type(self).order(self.started)
        self.started.remove(position)
        self.generated.append(position)
        return [self.group(position)]

    def group(self, position):
        row = self.dataset[self.order_of_prompts[position]]
        prompt_ids = TOKENIZER.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        ids = [draw_tokens(prompt_ids, position, i, 8) for i in range(self.num_generations)]
        completions = [[{"role": "assistant", "content": TOKENIZER.decode(each)}] for each in ids]
        version = type(self).version(position, self.shared.value)
        return GradedGroup(
            position=position,
            prompts=[row["prompt"]] * len(ids),
            completions=completions,
            prompt_ids=[prompt_ids] * len(ids),
            completion_ids=ids,
            mask=[[1] * len(each) for each in ids],
            logps=[[-5.5 - position / 100] * len(each) for each in ids],
            versions=[[version] * len(each) for each in ids],
            rewards=[digit_reward(completions)],
            logged=[[["log_metric", "share", 0.25], ["log_extra", "position", [position] * len(ids)]]],
            tool_calls=[0] * len(ids),
            tool_failures=[0] * len(ids),
            enqueued_at=time.time(),
        )

    def problem(self):
        return self.failure

    def measured(self):
        return {}

    def stop(self):
        pass


class Shared(SimpleNamespace):
    """The state that trainer and worker share; the worker has always read everything."""

    value, admitted, asked, oldest = 0, 0, 0, 0

    @property
    def drained(self):
        return self.asked


def play_worker(patch: Callable) -> type[ScriptedWorker]:
    """As if vLLM were installed, and workers were scripted; `patch(owner, name, value)` is `setattr`, or that of a
    monkeypatch. Returns the class of the workers."""
    worker = type("Script", (ScriptedWorker,), {"generated": []})
    patch(continuous, "RolloutWorker", worker)
    patch(server_watch, "_SECONDS_BETWEEN_CHECKS", 0.02)
    patch(worker_checks, "find_spec", lambda name: True)
    play_installed(patch)
    return worker


@contextmanager
def server_of(model):
    """A server that computes the log-probs of a text with the weights, or the adapter, that it got."""

    def prompt_logps(ids, directory):
        copied = copy.deepcopy(model)
        copied.load_state_dict(server.weights, strict=False)
        if directory is not None:
            copied = PeftModel.from_pretrained(copied, directory)
        with torch.no_grad():
            logps = copied(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return logps.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    with LoopbackVLLM(model.name_or_path) as server:
        server.prompt_logps = prompt_logps
        yield server
