"""GenACTrainer: questions, gradients of the critic by the long way, resuming, engines and servers, and bad input."""

import copy
import itertools

import pytest
import torch
from support import actor_critics
from support.actor_critics import ADAM, CriticRecorder, assert_close_gradients, assert_same_logs
from support.fake_llm import play_colocated
from support.models import TOKENIZER, assert_same_models, load_weights, tiny_model, trainable_weights
from support.problems import CRITIC_PROMPT, held_out
from support.rollouts import Parity, Replay, addition_dataset
from support.vllm_server import LoopbackVLLM, play_installed, server_settings

from pacs_trl.errors import FailedRun
from pacs_trl.experimental._critic import CriticPrompt, check_critic, reinforce_weights
from pacs_trl.experimental.genac import GenACConfig, GenACTrainer
from pacs_trl.rollouts import evaluation


SETTINGS = actor_critics.SETTINGS | {"critic_prompt": CRITIC_PROMPT, "critic_max_new_tokens": 6, "max_segments": 3}
SETTINGS |= {"critic_pretraining_steps": 0}


def build(output_dir, model_path, *, read=True, **settings):
    """An untrained critic generates no tags; with `read` most of its answers count as some value all the same."""
    trainer = actor_critics.build(GenACTrainer, output_dir, model_path, **(SETTINGS | settings))
    parse = trainer._critic_prompt.parse
    if read:
        trainer._critic_prompt.parse = lambda text: (
            score if (score := parse(text)) is not None else (sum(map(ord, text)) % 11 / 10 if len(text) % 7 else None)
        )
    return trainer


def logps_of(model, question, ids):
    logits = model(input_ids=torch.tensor([question + ids])).logits[0, len(question) - 1 : -1]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


class Notes(CriticRecorder):
    """Also keeps each generation as it goes to the learning, before it is shuffled."""

    def watch(self, trainer):
        def note(method, kept):
            def call(*args):
                kept.append(copy.deepcopy(result := method(*args)))
                return result

            return call

        self.trainer, self.batches, self.asked = trainer, [], []
        trainer._generate_and_score_completions = note(trainer._generate_and_score_completions, self.batches)
        trainer._states = note(trainer._states, self.asked)
        return trainer


@pytest.mark.trains
@pytest.mark.parametrize("settings", [{}, {"gae_lambda": 0.5}])
def test_two_updates_equal_the_long_way(tmp_path, model_path, settings):
    """Gradients of the critic by autograd in float64, one answer at a time; advantages from the values that were
    read."""
    notes, replay = Notes(), Replay(unverifiable=0.2)
    settings |= {"num_iterations": 2, "whiten_advantages": False}
    trainer = notes.watch(build(tmp_path, model_path, replay=replay, callbacks=[notes], **settings))
    critic = tiny_model().double()  # a copy of the trainer's would call the original
    trainer.train()
    (batch,), (asked,) = notes.batches, notes.asked
    rows, args = replay.rows(0, 16), trainer.args
    answers = [answer for row in batch["answers"] for answer in row]
    assert [len(row) == 0 for row in batch["answers"]] == [row.label is None for row in rows]
    values = [trainer._critic_prompt.parse(TOKENIZER.decode(answer["ids"])) for answer in answers]
    rewards = [0.0 if v is None else 1 - (each.outcome - v) ** 2 for v, each in zip(values, asked, strict=True)]
    weights = reinforce_weights(torch.tensor(rewards), torch.tensor([a.outcome for a in asked]))
    assert [answer["weight"] for answer in answers] == pytest.approx(weights.tolist(), abs=1e-6)

    tokens = sum(len(answer["ids"]) for answer in answers)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for update in range(2):
        load_weights(critic, notes.critics[update])
        critic.zero_grad()
        loss = 0.0
        for answer in answers:
            logps = logps_of(critic, answer["prompt"], answer["ids"])
            ratios = (logps.detach() - torch.tensor(answer["logps"])).exp().clamp(max=2.0)
            loss = loss - (ratios * logps).sum() * answer["weight"] / tokens
        loss.backward()
        before, after = notes.critics[update : update + 2]
        moved = {n: (w - after[n]) / args.critic_learning_rate for n, w in before.items()}
        assert_close_gradients(moved, {n: p.grad.float() for n, p in critic.named_parameters()})
        assert logs[update]["genac/critic_loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-7)
    for i, row in enumerate(rows):  # values are those of segments, advantages what they leave of the reward
        if row.label is not None and args.gae_lambda == 1.0:
            row_values = batch["values"][i, : len(row.completion_ids)]
            torch.testing.assert_close(batch["advantages"][i, : len(row_values)], row.label - row_values)
            pairs = [(v, state) for v, state in zip(values, asked, strict=True) if state.completion == i]
            read = {v or 0.0 for v, state in pairs if state.begins_segment}
            assert {round(v, 6) for v in row_values.tolist()} == {round(v, 6) for v in read}


@pytest.mark.trains
def test_what_the_critic_is_asked(tmp_path, model_path):
    """Prefixes before the first token of each segment, no solution; the pooled outcome at the beginning, and the state
    before the last token."""
    replay = Replay(truncated=0.0, uniform_groups=0)
    notes = Notes()
    trainer = notes.watch(build(tmp_path, model_path, replay=replay, callbacks=[notes], max_steps=2, read=False))
    problem = trainer.train_dataset[0]["prompt"][0]["content"]
    trainer.train()
    rows, asked = replay.rows(0, 16), notes.asked[0]
    means = [sum(row.label for row in rows[i - i % 4 :][:4]) / 4 for i in range(16)]
    for i, row in enumerate(rows):
        row_states = [each for each in asked if each.completion == i]
        lengths = [each.tokens_used for each in row_states]
        assert lengths[0] == 0 and lengths == sorted(set(lengths)) and lengths[-1] == len(row.completion_ids) - 1
        assert all(each.begins_segment for each in row_states[:-1]) and len(row_states) <= 4
        assert [each.outcome for each in row_states] == [means[i], *[row.label] * (len(row_states) - 1)] or len(
            row_states
        ) == 1
        for state in row_states:
            prefix = row.completion_ids[: state.tokens_used]
            assert state.response == TOKENIZER.decode(prefix, skip_special_tokens=True)
    question = TOKENIZER.decode(notes.batches[0]["answers"][0][0]["prompt"])
    assert problem and f"unknown 0/16 {asked[0].problem}" in question  # nobody has been right yet
    later = TOKENIZER.decode(notes.batches[1]["answers"][0][0]["prompt"])
    assert f"{sum(row.label for row in rows) / 16:.0%} 0/16" in later
    log = trainer.state.log_history[0]
    brier = sum(a.outcome**2 for a in asked) / len(asked)
    assert log["genac/unparsed"] == 1.0 and log["genac/brier"] == pytest.approx(brier)
    assert log["genac/critic_reward"] == 0.0 and log["genac/segments"] <= 3 and log["time/critic"] > 0
    assert log["time/total"] >= log["time/critic"] + log["time/generation"]


ALONE = ADAM | {"critic_pretraining_steps": 1}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, model_path):
    """Four updates over two generations, a checkpoint after each."""
    notes, directory = Notes(), tmp_path_factory.mktemp("run")
    trainer = build(directory, model_path, callbacks=[notes], save_strategy="steps", save_steps=1, **ALONE)
    notes.watch(trainer).train()
    return trainer, notes


def test_the_critic_learns_alone_at_first(finished_run):
    _, notes = finished_run
    assert all(torch.equal(weight, notes.weights[1][name]) for name, weight in notes.weights[0].items())
    assert any(not torch.equal(weight, notes.weights[2][name]) for name, weight in notes.weights[1].items())
    for before, after in zip(notes.critics, notes.critics[1:]):
        assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("update", [1, 2])
def test_a_resumed_run_is_bit_identical(tmp_path, model_path, finished_run, update):
    """Both models, both optimizers, answers that were generated and not learned from, and the success rate."""
    trainer, _ = finished_run
    resumed = build(tmp_path, model_path, **ALONE)
    resumed.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-{update}")
    assert_same_models(resumed, trainer)
    assert_same_logs(resumed, trainer, update)


def test_evaluation_is_greedy_and_teaches_nothing(tmp_path, model_path):
    notes = Notes()
    trainer = notes.watch(build(tmp_path, model_path, per_device_eval_batch_size=8))
    before = trainable_weights(trainer.critic)
    assert 0.0 <= trainer.evaluate(addition_dataset(8))["eval_genac/brier"] <= 1.0
    assert "answers" not in notes.batches[0] and trainer._success_rate is None
    assert all(torch.equal(weight, trainer.critic.get_parameter(name)) for name, weight in before.items())
    assert all(each.begins_segment for each in notes.asked[0])


@pytest.mark.slow
def test_a_run_with_evaluations_learns_the_same(tmp_path, model_path, monkeypatch):
    monkeypatch.setattr(evaluation, "shared_verifier", Parity)
    settings = {"critic_max_new_tokens": 4, "critic_pretraining_steps": 1, "max_completion_length": 8, "max_steps": 3}
    evaluating = {"eval_strategy": "steps", "eval_steps": 1, "eval_benchmarks": held_out(), "eval_max_problems": 5}
    evaluating |= {"eval_num_samples": 4, "eval_temperature": 0.7}
    plain = build(tmp_path, model_path, **settings)
    plain.train()
    evaluated = build(tmp_path, model_path, **settings, **evaluating)
    evaluated.train()
    assert sum("eval_pass@4" in entry for entry in evaluated.state.log_history) == 3
    assert_same_models(plain, evaluated)


def test_one_engine_serves_both_in_turn(tmp_path, model_path, monkeypatch):
    """It has the weights of the model that writes, and only the critic's answers end with the tag."""
    settings = play_colocated(monkeypatch)
    trainer = build(tmp_path, model_path, **settings)
    models = {"policy": trainer.model, "critic": trainer.critic}
    owners = {p.data_ptr(): name for name, model in models.items() for p in model.parameters()}
    engine, sent, asked = trainer.vllm_generation.llm.llm, [], []
    model = engine.llm_engine.model_executor.driver_worker.model_runner.model
    model.load_weights = lambda weights: sent.extend(owners[weight.data_ptr()] for _, weight in weights)
    generate = engine.generate

    def note(prompts, sampling_params, **kwargs):
        asked.extend((sent[-1], vars(p).get("stop"), p.max_tokens, p.seed) for p in sampling_params)
        return generate(prompts, sampling_params, **kwargs)

    engine.generate = note
    trainer.train()
    assert [name for name, _ in itertools.groupby(sent)] == ["policy", "critic", "policy", "critic"]
    kinds = {each[:3] for each in asked if each[0] == "policy"} | {
        (name, *stop, most) for name, stop, most, _ in asked if name == "critic"
    }
    assert kinds == {("policy", None, 16), ("critic", ">", 6)}
    seeds = [seed for *_, seed in asked]
    assert len(set(seeds)) == len(seeds) and None not in seeds
    assert trainer.state.log_history[0]["genac/critic_grad_norm"] > 0


@pytest.mark.slow
def test_a_run_ends_in_order_when_the_server_dies_while_the_critic(tmp_path, model_path, monkeypatch):
    """The state after the last optimizer step is saved, and a run that goes on comes to the same weights."""
    play_installed(monkeypatch.setattr)
    with LoopbackVLLM(model_path) as server:
        settings = server_settings(server.url)
        whole = build(tmp_path / "whole", model_path, **settings)
        whole.train()
        # requests of a generation share their seed: those of policy and critic, in turn
        policy, critic, *later = [len(list(same)) for _, same in itertools.groupby(server.seeds)]
        assert len(later) == 2 and len({*server.seeds}) == 4
        server.fail_generation = len(server.seeds) + policy + critic + later[0]
        trainer = build(tmp_path / "run", model_path, **settings)
        with pytest.raises(FailedRun, match=server.url):
            trainer.train()
        server.dead, server.fail_generation = False, None
        resumed = build(tmp_path / "run", model_path, **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert_same_models(resumed, whole)


class TestBadInput:
    """Before any weights are loaded."""

    @pytest.fixture(autouse=True)
    def nothing_is_loaded(self, monkeypatch):
        monkeypatch.setattr("pacs_trl.baselines.ppo_trainer.create_model_from_path", None)
        monkeypatch.setattr("trl.trainer.grpo_trainer.create_model_from_path", None)

    def test_a_critic_that_exceeds_its_context_is_refused(self, tmp_path, model_path):
        with pytest.raises(ValueError, match="critic_max_new_tokens=490"):
            build(tmp_path, model_path, critic_max_new_tokens=490)

    def test_the_longest_prompt_of_a_critic_has_the_most_tokens_and_not_the_most_characters(self, model_path):
        args = GenACConfig("unused", **(SETTINGS | {"critic_max_new_tokens": 10_000}))
        digits, ideographs = "1" * 60, "一" * 50  # 60 and 150 tokens

        def refusal(*prompts):
            with pytest.raises(ValueError, match="has a context of") as error:
                check_critic(tiny_model(), str(model_path), args, TOKENIZER, CriticPrompt(CRITIC_PROMPT), prompts)
            return str(error.value)

        assert refusal(digits, ideographs) == refusal(ideographs) != refusal(digits)

    def test_vllm_refuses_a_critic_of_another_architecture(self, monkeypatch):
        args = GenACConfig("unused", **SETTINGS)
        args.use_vllm = True
        other = tiny_model(hidden_size=64).config
        monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *a, **k: other)
        with pytest.raises(ValueError, match="another architecture"):
            check_critic(tiny_model(), "critic", args, TOKENIZER, CriticPrompt(CRITIC_PROMPT), ["1+1"])
