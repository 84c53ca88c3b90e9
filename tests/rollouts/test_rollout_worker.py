"""TRL's rollout worker as continuous rollouts use it, against a server without a model."""

import asyncio
import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from accelerate import PartialState
from datasets import Dataset
from support import vllm_server
from support.models import TOKENIZER, tiny_model
from support.optional_packages import needs
from support.processes import CONTEXT, ensure_server, start
from support.rollouts import digit_reward
from support.runs import build_trainer, spy_on
from support.scripted_worker import server_of
from support.vllm_server import LoopbackVLLM, draw_tokens, play_installed, server_settings
from trl.experimental.async_grpo import async_rollout_worker

from experiments.miniature.tokenizer import build_tokenizer
from pacs_trl import GRPOTrainer
from pacs_trl.rewards import VerificationArguments, math_reward
from pacs_trl.rollouts.prompt_order import PromptOrder
from pacs_trl.rollouts.request_seeds import request_seed
from pacs_trl.rollouts.rollout_worker import RolloutLoop, RolloutWorker, VersionedLogp


pytestmark = needs("aiohttp")
ROWS = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"{i} + 1 ="}], "solution": str(i + 1)} for i in range(6)]
)
NUM_GENERATIONS = 2


def length_reward(completions, completion_ids, truncated, log_metric, log_extra, **kwargs):
    log_metric("share", 0.5)
    log_extra("length", [len(ids) for ids in completion_ids])
    assert truncated == [False] * len(completions)
    return [float(len(ids)) for ids in completion_ids]


async def none_reward(completions, **kwargs):
    await asyncio.sleep(0)
    return [None] * len(completions)


def arguments_of(server, **changed):
    return {
        "model_name": "model",
        "dataset": ROWS,
        "reward_funcs": [length_reward, none_reward],
        "processing_class": TOKENIZER,
        "eos_token_ids": [TOKENIZER.eos_token_id],
        "num_generations": NUM_GENERATIONS,
        "max_inflight_tasks": 8,
        "vllm_server_url": server.url,
        "max_tokens": 12,
        "order": PromptOrder(len(ROWS), 2, shuffle=False, seed=0),
        "missing": [],
        "next_position": 0,
        "seed": 7,
        "generation_kwargs": {},
        "verification": VerificationArguments(),
        "max_steps": 5,
        "prompt_date": "2026-01-01",
        **changed,
    }


class Loop:
    """A loop in a thread of this process."""

    def __init__(self, **arguments):
        self.shared = SimpleNamespace(value=0, admitted=0, asked=0, drained=0)
        self.groups: queue.Queue = queue.Queue()
        self.failure: queue.Queue = queue.Queue()
        self.metrics: queue.Queue = queue.Queue()
        self.loop = RolloutLoop(
            **arguments,
            rollout_buffer=self.groups,
            model_version_value=self.shared,
            heartbeat_value=SimpleNamespace(value=0.0),
            failed_event=threading.Event(),
            exception_info_queue=self.failure,
            metrics_queue=self.metrics,
        )
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        try:
            self.loop.run()
        except Exception:  # reported in `failure`
            pass

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exc_info):
        with contextlib.suppress(RuntimeError):  # it has ended by itself and closed its event loop
            self.loop._loop.call_soon_threadsafe(self.loop._stop_event.set)
        self.thread.join(20)
        assert not self.thread.is_alive()

    def take(self, number):
        return sorted((self.groups.get(timeout=20) for _ in range(number)), key=lambda group: group.position)


@pytest.fixture
def server(monkeypatch):
    play_installed(monkeypatch.setattr)
    PartialState()  # of accelerate, as in the process of a worker
    with LoopbackVLLM("model") as server:
        yield server


def test_whole_graded_groups_arrive_with_their_positions(server):
    with Loop(**arguments_of(server, missing=[1], next_position=4)) as loop:
        loop.shared.admitted = 3
        groups = loop.take(3)
    assert [group.position for group in groups] == [1, 4, 5]
    for group in groups:
        row = ROWS[group.position]
        assert group.prompts == [row["prompt"]] * NUM_GENERATIONS
        prompt_ids = TOKENIZER.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        seeds = [request_seed(f"7/continuous/{group.position}/{i}", 0) for i in range(NUM_GENERATIONS)]
        expected = [draw_tokens(prompt_ids, seed, 0, 12) for seed in seeds]
        assert sorted(group.completion_ids) == sorted(expected)
        assert group.prompt_ids == [prompt_ids] * NUM_GENERATIONS
        texts = [TOKENIZER.decode(ids, skip_special_tokens=True) for ids in group.completion_ids]
        assert group.completions == [[{"role": "assistant", "content": text}] for text in texts]
        assert group.mask == [[1] * len(ids) for ids in group.completion_ids]
        assert group.rewards == [[float(len(ids)) for ids in group.completion_ids], [None] * NUM_GENERATIONS]
        assert group.logged == [
            [["log_metric", "share", 0.5], ["log_extra", "length", [len(ids) for ids in group.completion_ids]]],
            [],
        ]


def test_no_group_starts_before_it_is_admitted(server):
    with Loop(**arguments_of(server)) as loop:
        loop.shared.admitted = 2
        loop.take(2)
        time.sleep(0.2)
        assert len(server.seeds) == 2 * NUM_GENERATIONS
        measured = [values for values in loop.metrics.queue if "rollout/inflight" in values]
        assert {values["rollout/inflight"] for values in measured} <= {*range(2 * NUM_GENERATIONS)}
        loop.shared.admitted = 3
        assert [group.position for group in loop.take(1)] == [2]


def test_each_token_has_the_version_of_the_weights_that_sampled_it(server):
    """The log-prob of the server is -1 minus the number of replacements before the token."""
    server.seconds_per_token = 0.01
    with Loop(**arguments_of(server, max_tokens=40)) as loop:
        loop.shared.admitted = 4
        for version in range(1, 8):
            time.sleep(0.03)
            server.paused = True
            time.sleep(0.02)
            loop.shared.asked += 1
            while loop.shared.drained != loop.shared.asked:
                time.sleep(0.001)
            server.num_updates = loop.shared.value = version
            server.paused = False
        groups = loop.take(4)
    versions = [version for group in groups for each in group.versions for version in each]
    logps = [logp for group in groups for each in group.logps for logp in each]
    assert versions == [-1 - logp for logp in logps]
    assert len(set(versions)) > 2
    assert sum(group.num_mixed for group in groups) > 0


def test_tokens_that_are_read_late_have_the_version_that_sampled_them(server, monkeypatch):
    """Those that a paused server had sent: the event loop may be busy, and read them in many rounds."""
    has_begun = threading.Event()

    async def stream_slowly(self, path, payload):
        has_begun.set()
        for token in (65, 66, 67, 68, 69, 70, 71, TOKENIZER.eos_token_id):
            await asyncio.sleep(0.006)
            yield {"token_ids": [token], "logprobs": {"token_logprobs": [-1.0]}}

    monkeypatch.setattr(RolloutLoop, "_stream", stream_slowly)
    with Loop(**arguments_of(server, num_generations=1)) as loop:
        loop.shared.admitted = 1
        assert has_begun.wait(20)
        loop.shared.asked = 1
        while loop.shared.drained != 1:
            time.sleep(0.001)
        loop.shared.value = 1
        (group,) = loop.take(1)
    assert group.versions == [[0] * 8]


def test_a_group_that_is_graded_slowly_does_not_keep_others_waiting(server):
    with Loop(**arguments_of(server, reward_funcs=[slow_for_the_first])) as loop:
        loop.shared.admitted = 4
        first = [loop.groups.get(timeout=20).position for _ in range(3)]
        assert 0 not in first
        release.set()
        assert loop.groups.get(timeout=20).position == 0


release = threading.Event()


def slow_for_the_first(completions, solution, **kwargs):
    if solution[0] == "1":
        release.wait(20)
    return [1.0] * len(completions)


def adds(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


def test_turns_share_the_length_of_a_completion_and_tokens_of_tools_are_masked(server, monkeypatch):
    """The completion ends with the last token that was sampled."""
    seen = []

    def parse(tokenizer, ids, prefix=None, tools=None):
        seen.append(ids)
        message = {"role": "assistant", "content": "12"}
        return message | ({"tool_calls": [call("adds", {"a": 1, "b": 2})]} if len(seen) == 1 else {})

    texts = {1: "12@adds|a=1|b=2", 2: "12"}  # as the chat template writes these messages
    monkeypatch.setattr(
        vllm_server,
        "draw_tokens",
        lambda *arguments: [*TOKENIZER(texts[len(server.seeds)])["input_ids"], TOKENIZER.eos_token_id],
    )
    monkeypatch.setattr(async_rollout_worker, "parse_response", parse)
    monkeypatch.setattr(async_rollout_worker, "is_chat_template_prefix_preserving", lambda tokenizer: True)
    monkeypatch.setattr(TOKENIZER, "response_template", {}, raising=False)
    loop_arguments = arguments_of(server, tools=[adds], num_generations=1, max_inflight_tasks=1, max_tokens=200)
    with Loop(**loop_arguments | {"reward_funcs": [none_reward]}) as loop:
        loop.shared.admitted = 1
        (group,) = loop.take(1)
    assert group.tool_calls == [1]
    assert group.completions[0][1] == {"role": "tool", "name": "adds", "content": "3"}
    first, second = server.requests[:2]
    assert second["max_tokens"] == 200 - (len(second["prompt"]) - len(first["prompt"]))
    (mask,), (ids,), (versions,) = group.mask, group.completion_ids, group.versions
    calls, answer = seen
    assert ids[: len(calls)] == calls
    assert ids[-len(answer) :] == answer
    assert mask == [1] * len(calls) + [0] * (len(ids) - len(calls) - len(answer)) + [1] * len(answer)
    assert "3" in TOKENIZER.decode(ids[len(calls) : -len(answer)])
    assert [version == -1 for version in versions] == [m == 0 for m in mask]


def test_a_turn_ends_with_the_adapter_with_which_it_began(server, monkeypatch):
    """The next one names the newest adapter; `oldest` is the first version that a turn still names."""

    def replace_adapter(version):
        loop.shared.value = version
        loop.shared.asked += 1
        while loop.shared.drained != loop.shared.asked:
            time.sleep(0.001)

    tokenizer = build_tokenizer(tools=True)
    called = [*tokenizer("12@adds|a=1|b=2")["input_ids"], tokenizer.eos_token_id]
    answer = [*tokenizer("3")["input_ids"], tokenizer.eos_token_id]
    monkeypatch.setattr(vllm_server, "draw_tokens", lambda *arguments: answer if len(server.seeds) > 1 else called)
    loop_arguments = arguments_of(server, tools=[adds], num_generations=1, max_inflight_tasks=1, max_tokens=200)
    loop_arguments |= {"reward_funcs": [none_reward], "processing_class": tokenizer, "lora_name": "adapter"}
    server.paused = True
    with Loop(**loop_arguments) as loop:
        loop.shared.value, loop.shared.admitted = 3, 1
        while not server.requests:
            time.sleep(0.001)
        replace_adapter(4)
        assert loop.shared.oldest == 3
        server.paused = False
        (group,) = loop.take(1)
        replace_adapter(5)
        assert loop.shared.oldest == 5
    assert [request["model"] for request in server.requests] == ["adapter-v3", "adapter-v4"]
    (mask,), (versions,) = group.mask, group.versions
    sampled = [version for version, m in zip(versions, mask, strict=True) if m]
    assert sampled == [3] * len(called) + [4] * len(answer)


def test_a_turn_without_room_is_empty_and_ends_the_conversation(server, monkeypatch):
    """Prompt and results of tools have used all tokens of the completion."""
    tokenizer = build_tokenizer(tools=True)
    loop_arguments = arguments_of(server, tools=[adds], num_generations=1, max_inflight_tasks=1, max_tokens=20)
    called = [*tokenizer("12@adds|a=1|b=2")["input_ids"], tokenizer.eos_token_id]
    monkeypatch.setattr(vllm_server, "draw_tokens", lambda *arguments: called)
    with Loop(**loop_arguments | {"reward_funcs": [none_reward], "processing_class": tokenizer}) as loop:
        loop.shared.admitted = 1
        (group,) = loop.take(1)
    assert len(server.requests) == 1
    assert group.tool_calls == [1]
    assert group.completion_ids == [called]
    assert [message["role"] for message in group.completions[0]] == ["assistant", "tool", "assistant"]
    assert group.completions[0][-1]["content"] == ""


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


class Counter:
    """An environment whose start and reward depend on its seed."""

    def reset(self, seed, **kwargs):
        self.seed = seed
        return f" (seed {seed})"

    def get_reward(self) -> float:
        return float(self.seed % 7)


def test_the_completions_of_a_group_start_their_environment_alike(server, monkeypatch):
    monkeypatch.setattr(TOKENIZER, "response_template", {}, raising=False)
    monkeypatch.setattr(
        async_rollout_worker, "parse_response", lambda *args, **kwargs: {"role": "assistant", "content": "done"}
    )
    loop_arguments = arguments_of(server, environment_factory=Counter, reward_funcs=[])
    with Loop(**loop_arguments) as loop:
        loop.shared.admitted = 2
        groups = loop.take(2)
    for group in groups:
        seed = request_seed("7/environments", group.position)
        assert group.prompts[0][-1]["content"].endswith(f" (seed {seed})")
        assert group.prompts[0] == group.prompts[1]
        assert group.rewards == [[seed % 7] * NUM_GENERATIONS]


def test_answers_are_graded_by_the_verifier_of_the_package(server):
    with Loop(**arguments_of(server, reward_funcs=[math_reward])) as loop:
        loop.shared.admitted = 1
        (group,) = loop.take(1)
    assert group.rewards == [[0.0, 0.0]]
    assert ["log_extra", "solution", ["1", "1"]] in group.logged[0]


def broken_reward(completions, **kwargs):
    raise ValueError("no such column")


def test_an_exception_of_a_reward_function_ends_the_loop_and_is_reported(server):
    with Loop(**arguments_of(server, reward_funcs=[broken_reward])) as loop:
        loop.shared.admitted = 1
        name, message, _ = loop.failure.get(timeout=20)
    assert (name, message) == ("ValueError", "no such column")


def misaligned_reward(completions, log_extra, **kwargs):
    log_extra("length", [1])
    return [1.0] * len(completions)


def test_a_column_that_is_not_as_long_as_its_group_is_reported(server):
    with Loop(**arguments_of(server, reward_funcs=[misaligned_reward])) as loop:
        loop.shared.admitted = 1
        name, message, _ = loop.failure.get(timeout=20)
    assert name == "UserError"
    assert "log_extra('length', ...) got [1] for 2 completions" in message


def twice_logged_reward(completions, log_extra, **kwargs):
    log_extra("length", [1, 2])
    log_extra("length", [3, 4])
    return [1.0] * len(completions)


def test_columns_of_one_name_are_kept_apart(server):
    with Loop(**arguments_of(server, reward_funcs=[twice_logged_reward])) as loop:
        loop.shared.admitted = 1
        (group,) = loop.take(1)
    assert group.logged == [[["log_extra", "length", [1, 2]], ["log_extra", "length_2", [3, 4]]]]


def test_a_server_that_ends_requests_early_is_reported_as_its_failure(server):
    server.dead = True
    with Loop(**arguments_of(server)) as loop:
        loop.shared.admitted = 1
        name, message, _ = loop.failure.get(timeout=20)
    assert name == "ServerError"
    assert "ended a completion early" in message


def test_a_stop_ends_requests_at_once(server):
    server.paused = True
    with Loop(**arguments_of(server)) as loop:
        loop.shared.admitted = 4
        while not server.seeds:
            time.sleep(0.01)
    assert loop.failure.empty()
    server.paused = False


def test_a_log_prob_with_a_version_is_a_number():
    logp = VersionedLogp(-1.5, 3)
    assert logp == -1.5
    assert logp.version == 3
    assert [*[logp], 0.0][0].version == 3


def run_worker(url: str, ready) -> None:
    play_installed(setattr)
    PartialState()
    worker = forked_worker(SimpleNamespace(url=url))
    worker.start()
    worker.shared.admitted = 100
    worker.receive(20)
    ready.put(worker._process.pid)
    time.sleep(60)


def forked_worker(server):
    """A worker whose process is forked from the server of `processes.py`."""
    ensure_server()
    async_rollout_worker.mp = SimpleNamespace(get_context=lambda name: CONTEXT)
    try:
        return RolloutWorker(**arguments_of(server))
    finally:
        async_rollout_worker.mp = multiprocessing


def test_a_worker_whose_process_could_not_be_started_can_be_stopped(server):
    worker = RolloutWorker(**arguments_of(server))
    worker._process = worker._mp_ctx.Process()
    worker.stop()
    assert worker._process is None


class Adder(Counter):
    """An environment with a tool."""

    def adds(self, a: int, b: int) -> int:
        """
        Add two numbers.

        Args:
            a: The first one.
            b: The second one.
        """
        return a + b


@pytest.mark.slow
def test_a_run_trains_conversations_with_an_environment_as_its_worker_had_them(tmp_path, monkeypatch):
    """The tokens of tools are masked, and have no log-probs; the environment has called them, and gives rewards."""

    def draw(prompt_ids, *arguments):
        return answer if "@adds" in tokenizer.decode(prompt_ids) else called

    tokenizer = build_tokenizer(tools=True)
    called = [*tokenizer("12@adds|a=1|b=2")["input_ids"], tokenizer.eos_token_id]
    answer = [*tokenizer("3")["input_ids"], tokenizer.eos_token_id]
    play_installed(monkeypatch.setattr)
    monkeypatch.setattr(vllm_server, "draw_tokens", draw)
    monkeypatch.setattr(async_rollout_worker, "mp", SimpleNamespace(get_context=lambda name: CONTEXT))
    ensure_server()
    groups, rollouts = [], []
    settings = {"rollout_schedule": "continuous", "max_staleness": 1, "max_completion_length": 200, "max_steps": 1}
    more = {"environment_factory": Adder, "processing_class": tokenizer}
    with server_of(tiny_model()) as server:
        settings |= server_settings(server.url)
        trainer = build_trainer(tmp_path, reward=digit_reward, trainer_class=GRPOTrainer, more=more, **settings)
        spy_on(trainer, "_create_source", lambda source: spy_on(source, "_take_groups", groups.extend))
        spy_on(trainer, "_generate_rollouts", lambda taken, inputs: rollouts.extend(taken))
        trainer.train()
    (log,) = [log for log in trainer.state.log_history if "reward" in log]
    seeds = [request_seed(f"{trainer.args.seed}/environments", group.position) for group in groups]
    assert log["tools/call_frequency"] == 1
    assert log["rewards/Adder/mean"] == pytest.approx(sum(seed % 7 for seed in seeds) / len(seeds))
    completions = [(group, i) for group in groups for i in range(len(group.completions))]
    for (group, i), rollout in zip(completions, rollouts, strict=True):
        assert f" (seed {seeds[groups.index(group)]})" in tokenizer.decode(rollout.prompt_ids)
        assert rollout.completion_ids.tolist() == group.completion_ids[i]
        assert rollout.loss_mask.tolist() == [m == 1 for m in group.mask[i]]
        assert 0 < sum(group.mask[i]) == len(called) + len(answer) < len(group.mask[i])
        assert rollout.old_logps[rollout.loss_mask] == pytest.approx(-1.0 - server.num_updates)


@pytest.mark.slow
def test_the_process_of_a_worker_delivers_groups_and_ends_with_its_parent(server, tmp_path):
    server.seconds_per_token = 0.001
    ready = CONTEXT.Queue()
    parent = start(run_worker, server.url, ready, output=tmp_path / "output")
    pid = ready.get(timeout=60)
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    when_gone(pid)
    assert not alive(pid)


def when_gone(*pids: int) -> None:
    """Wait until processes have ended, at most 20 seconds."""
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
