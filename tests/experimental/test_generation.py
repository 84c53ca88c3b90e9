"""Guided attempts, more completions of hard prompts, and other prompts in place of uniform groups: what is drawn,
learnt and kept."""

import copy
import hashlib
import os
import random
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from support.models import LORA, TOKENIZER, assert_same_models, trainable_weights
from support.related_methods import DarsAndGuidanceTrainer
from support.rollouts import Replay, addition_dataset
from support.runs import build_trainer
from support.seeds import shifted
from transformers import AutoModelForCausalLM

from pacs_trl.errors import FailedRun
from pacs_trl.experimental._generation import ExtendingTrainer
from pacs_trl.experimental.dars import DARSTrainer, additional_completions
from pacs_trl.experimental.guidance import FEEDBACK as FEEDBACK_ON
from pacs_trl.experimental.guidance import WRONG, GuidanceTrainer, with_hint
from pacs_trl.rewards import math_reward
from pacs_trl.verification import Outcome


pytestmark = pytest.mark.trains


def share(*values) -> float:
    """A number in [0, 1) that depends on everything given."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:6]) / 2**48


def reward(prompts, completion_ids, solution, **kwargs) -> list[float | None]:
    """Half of the problems are nearly never solved, but for a hint or a second try; the others always, often or half
    of the time."""
    rates = {0: 0.1, 1: 0.1, 2: 1.0, 3: 0.5}
    helped = ["Hint" in str(prompt) or len(prompt) > 1 for prompt in prompts]
    chances = [0.7 if help else rates[int(answer) % 4] for help, answer in zip(helped, solution)]
    return [float(share(list(ids)) < chance) for ids, chance in zip(completion_ids, chances)]


def most_are_hard(prompts, solution, **kwargs) -> list[float]:
    """Prompts whose solution is no multiple of three; the others are solved by every second completion."""
    hinted = [float("Hint" in str(prompt)) for prompt in prompts]
    return [
        is_hinted if int(answer) % 3 else float(i % 2) for i, (is_hinted, answer) in enumerate(zip(hinted, solution))
    ]


ADAPTIVE = {"adaptive_rollouts": "equal_treatment", "max_generations": 16}
WEIGHTED = {"adaptive_rollouts": "hardness_weighted", "max_generations": 16, "adaptive_rollouts_budget": 13}
HINTS = {"guidance": "hint", "max_guided_fraction": 0.25}
FEEDBACK = {"guidance": "feedback", "max_guided_fraction": 0.5, "guided_weight": 0.5}
REFILL = {"refill_uniform_groups": True, "max_refill_rounds": 2}
TWICE = {"num_iterations": 2, "steps_per_generation": 1, "group_layout": "split"}
RUNS = {  # engine, settings, what else the trainer gets
    "adaptive": ("colocate", ADAPTIVE | TWICE, {}),
    "adaptive with a budget": ("server", WEIGHTED | {"reference": "snapshot"}, {}),
    "hints": ("server", HINTS | {"vllm_importance_sampling_correction": True}, {}),
    "feedback": ("transformers", FEEDBACK | TWICE, {"peft_config": LORA}),
    "refill": ("colocate", REFILL, {}),
    "all, several generations in a step": (
        "colocate",
        WEIGHTED | HINTS | REFILL | {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
        {},
    ),
}


class Watching:
    """Keeps each generation as it was first drawn, and as it is learnt from."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.generations = []

    def complete_generation(self, generation_batch, rollouts, num_steps):
        rows = super().complete_generation(generation_batch, rollouts, num_steps)
        self.generations.append((by_group(rollouts), by_group(rows)))
        return rows


def watched(settings) -> type:
    """The trainer that has these settings."""
    base = (
        DarsAndGuidanceTrainer if settings.keys() & {"adaptive_rollouts", "refill_uniform_groups"} else GuidanceTrainer
    )
    return type("Watched", (Watching, base if "guidance" in settings else DARSTrainer), {})


def by_group(rows) -> dict:
    groups = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return groups


def dataset(num_prompts=64):
    return addition_dataset(num_prompts).map(lambda row: {"hint": f"Think of {int(row['solution']) % 7} apples."})


def built(output_dir, model_path, settings, more=None, **overrides):
    defaults = {"learning_rate": 3e-3, "optim": "adamw_torch", "steps_per_generation": 2, "max_steps": 4}
    defaults |= {"save_strategy": "steps", "save_steps": 1}
    return build_trainer(
        output_dir,
        trainer_class=overrides.pop("trainer_class", watched(settings)),
        reward=overrides.pop("reward", reward),
        model=model_path,
        more={"train_dataset": dataset()} | (more or {}),
        **(defaults | settings | overrides),
    )


def history(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize(("engine", "settings", "more"), RUNS.values(), ids=RUNS, indirect=["engine"])
def test_a_run_that_goes_on_from_any_step_is_bit_identical(tmp_path, model_path, engine, settings, more):
    """A run that goes on from any step, also inside a generation, ends with the same bits."""
    settings = engine[0] | settings | {"max_steps": 3}
    straight = built(tmp_path / "straight", model_path, settings, more)
    straight.train()
    sizes = [len(rows) for _, groups in straight.generations for rows in groups.values()]
    labels = [[[row.label for row in rows] for rows in first.values()] for first, _ in straight.generations]
    hard = any(np.mean(group) < 0.5 for groups in labels for group in groups)
    assert (max(sizes) > 4) == ("adaptive_rollouts" in settings and hard)
    rewards = [np.mean(groups) for groups in labels]
    if "gradient_accumulation_steps" not in settings:  # of the first draw alone
        assert history(straight, "reward") == pytest.approx(rewards)
    glossary = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    names = {name for name in straight.state.log_history[0] if name.startswith(("adaptive/", "guidance/", "refill/"))}
    assert names and all(f"`{name}`" in glossary for name in names), names
    for step in (1, 2):
        resumed = built(tmp_path / "resumed", model_path, settings, more)
        resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{step}"))
        assert_same_models(resumed, straight)
        for name in ("loss", "grad_norm", "num_tokens", "adaptive/additional", "guidance/solved", "refill/epochs"):
            assert history(resumed, name) == history(straight, name), name


def test_completions_after_an_interrupted_extension_are_first_ones_again():
    trainer = object.__new__(ExtendingTrainer)
    trainer.accelerator = SimpleNamespace(num_processes=1, process_index=0)
    trainer._metrics = {"train": {}}

    def generate_more(examples, num_completions, groups):
        assert trainer.source == "guidance"
        raise KeyboardInterrupt

    trainer.generate_more = generate_more
    with pytest.raises(KeyboardInterrupt):
        trainer.generate_for([(0, {"prompt": "1+1"})], "guidance")
    assert trainer.source == "first"


USER, ASSISTANT = ({"role": role, "content": "1+1"} for role in ("user", "assistant"))
BLOCKS = {"role": "user", "content": [{"type": "text", "text": "1+1"}]}
HINTED = USER | {"content": "1+1\n\nHint: two"}
HINTED_PROMPTS = {
    "text": ("1+1", "1+1\n\nHint: two"),
    "one turn": ([USER], [HINTED]),
    "two turns": ([USER, ASSISTANT, USER], [USER, ASSISTANT, HINTED]),
    "ends with an assistant's turn": ([USER, ASSISTANT], [HINTED, ASSISTANT]),
    "blocks": (
        [BLOCKS],
        [BLOCKS | {"content": [*BLOCKS["content"], {"type": "text", "text": "\n\nHint: two"}]}],
    ),
}


@pytest.mark.parametrize(("prompt", "hinted"), HINTED_PROMPTS.values(), ids=HINTED_PROMPTS)
def test_a_hint_is_at_the_end_of_the_last_user_turn(prompt, hinted):
    before = copy.deepcopy(prompt)
    assert with_hint(prompt, "two") == hinted
    assert prompt == before


def test_the_schedule_decides_from_the_first_draw(tmp_path, model_path):
    trainer = built(tmp_path, model_path, ADAPTIVE, max_steps=8, save_strategy="no")
    trainer.train()
    extended = 0
    for first, groups in trainer.generations:
        assert list(groups) == sorted(groups)
        for group, rows in groups.items():
            right = sum(row.label for row in first[group])
            more = additional_completions(right, 4, schedule="equal_treatment", max_generations=16)
            assert len(rows) == 4 + more and rows[:4] == first[group]
            assert len({tuple(row.prompt_ids) for row in rows}) == 1
            assert len({tuple(row.completion_ids) for row in rows}) > 1
            extended += more
    assert extended == sum(history(trainer, "adaptive/additional")) == sum(history(trainer, "adaptive/wanted"))


def test_prompts_without_verdicts_get_no_more(tmp_path, model_path):
    def unsure(completion_ids, **kwargs):
        return [None for _ in completion_ids]

    trainer = built(tmp_path, model_path, ADAPTIVE | HINTS, reward=unsure, max_steps=1, save_strategy="no")
    with pytest.raises(FailedRun, match="None for every completion"):  # of the whole run
        trainer.train()
    assert history(trainer, "adaptive/wanted") == history(trainer, "guidance/attempted") == [0]
    ((first, groups),) = trainer.generations
    assert first.keys() == groups.keys() and all(len(rows) == 4 for rows in groups.values())


@pytest.mark.parametrize("engine", ["colocate"], indirect=True)
def test_guided_answers_are_learnt_under_the_plain_prompt(tmp_path, model_path, engine):
    settings = engine[0] | HINTS | {"max_steps": 6, "save_strategy": "no", "log_completions": True}
    trainer = built(tmp_path, model_path, settings, reward=most_are_hard)
    trainer.train()
    guided, expected = 0, []
    for first, groups in trainer.generations:
        for step in zip(*[iter(first.values())] * 2):
            # half of a group without a right answer, 2 of 4, if that is within a quarter of the 8 rows of the step
            hard = [rows[0].prompt_ids for rows in step if max(row.label for row in rows) == 0]
            expected += [TOKENIZER.decode(ids).split("<|im_end|>")[0] for ids in hard for _ in range(2 // len(hard))]
        for group, rows in groups.items():
            kept = [row for row in rows if "guided" not in row.extra]
            new = [row for row in rows if "guided" in row.extra]
            assert len(rows) == 4 and kept == first[group][: len(kept)] and len(new) <= 2
            assert all(row.label == 1.0 and np.isnan(row.sampling_logps).all() for row in new)
            assert len({tuple(row.prompt_ids) for row in rows}) == 1  # without the hint
            assert not new or max(row.label for row in first[group]) == 0
            guided += len(new)
    assert guided == sum(history(trainer, "guidance/solved")) > 0
    requests = [TOKENIZER.decode(ids) for ids, _ in trainer.vllm_generation.llm.requests]
    asked = [text for text in requests if "Hint: Think of " in text]
    assert len(asked) == sum(history(trainer, "guidance/attempted"))
    assert all(text.startswith(plain) for text, plain in zip(asked, expected, strict=True))
    assert {1, 2} == set(Counter(asked).values())
    table = pd.concat([pd.read_parquet(file) for file in sorted((tmp_path / "completions").glob("*.parquet"))])
    table = table[table["step"] % 2 == 1]  # the second step of a generation writes it again
    marked = table[table["source"] == "guidance"]
    assert len(marked) == len(asked) and all("Hint" in str(prompt) for prompt in marked["prompt"])
    assert set(table["source"]) == {"first", "guidance"}
    # half the weight is half the coefficient, on guided rows alone
    rows = [row for _, groups in trainer.generations for rows in groups.values() for row in rows]
    step, every, proxies = trainer.update.schedule_minibatch(rows), list(range(len(rows))), torch.zeros(len(rows))
    plain = trainer.update.coefficients(step, every, proxies)
    for row in rows:
        row.weight = 0.5 if "guided" in row.extra else 1.0
    halved = trainer.update.coefficients(step, every, proxies)
    for row, before, after in zip(rows, plain.tolist(), halved.tolist(), strict=True):
        assert after == before * row.weight and (before < 0 or "guided" not in row.extra)


def test_feedback_is_a_second_turn(tmp_path, model_path):
    trainer = built(tmp_path, model_path, FEEDBACK, reward=math_reward, max_steps=1, save_strategy="no")
    generate, asked = trainer._generate, []
    trainer._generate = lambda prompts: asked.append(prompts) or generate(prompts)
    trainer.train()
    first, _ = trainer.generations[0]
    assert len(asked[1]) == history(trainer, "guidance/attempted")[0] == 8
    for prompt, rows in zip(asked[1][::2], first.values()):
        attempt = TOKENIZER.decode(rows[0].completion_ids, skip_special_tokens=True)
        plain, tried, answer = prompt
        ids = TOKENIZER.apply_chat_template([plain], add_generation_prompt=True)["input_ids"]
        assert ids == rows[0].prompt_ids.tolist()
        assert (tried["content"], answer["content"]) in [(attempt, FEEDBACK_ON[Outcome.NO_ANSWER]), (attempt, WRONG)]
        assert (tried["role"], answer["role"]) == ("assistant", "user")
    assert sum(history(trainer, "guidance/solved")) == 0


def test_completions_without_a_label_are_no_failed_attempts(tmp_path):
    """Of a truncated completion that is masked, the token ids are gone as well."""

    def truncated(generation, rows):
        for row in rows:
            row.completion_ids, row.label = [60, 61, 62, TOKENIZER.eos_token_id], 0.0
        rows[0].completion_ids, rows[3].label = [60, 61, 62], None
        return rows

    settings = {"trainer_class": GuidanceTrainer, "mask_truncated_completions": True, "max_steps": 1} | FEEDBACK
    trainer = build_trainer(tmp_path, replay=Replay(edit=truncated), **settings)
    with_feedback, attempts = trainer._with_feedback, []
    trainer._with_feedback = lambda example, attempt, *other: (
        attempts.append(attempt) or with_feedback(example, attempt, *other)
    )
    trainer.train()
    assert attempts == [TOKENIZER.decode([60, 61, 62])] * 4
    assert history(trainer, "guidance/attempted") == [4]


def test_feedback_on_a_stream_of_texts_is_refused_before_generation(tmp_path):
    texts = addition_dataset(8).map(lambda row: {"prompt": row["solution"]}, remove_columns="prompt")
    more = {"train_dataset": texts.to_iterable_dataset()}
    replay = Replay(edit=lambda generation, rows: pytest.fail("generated"))
    trainer = build_trainer(tmp_path, trainer_class=GuidanceTrainer, replay=replay, more=more, **FEEDBACK)
    with pytest.raises(ValueError, match="guidance='feedback'"):
        trainer.train()


def test_other_prompts_take_the_places_of_uniform_groups(tmp_path, model_path):
    trainer = built(tmp_path, model_path, REFILL, max_steps=8, save_strategy="no")
    trainer.train()
    replaced = 0
    for first, groups in trainer.generations:
        assert first.keys() == groups.keys()
        for group, rows in groups.items():
            mixed = len({row.label for row in first[group]}) == 2
            assert (rows[0] is first[group][0]) == mixed and len(rows) == 4
            replaced += not mixed
        prompts = [tuple(rows[0].prompt_ids) for rows in groups.values()]
        assert len(set(prompts)) == 4
    left = [len({row.label for row in rows}) == 1 for _, groups in trainer.generations for rows in groups.values()]
    assert sum(left) < replaced
    assert sum(history(trainer, "refill/prompts")) >= replaced
    assert set(history(trainer, "refill/rounds")) <= {0, 1, 2}
    # four generations of 4 prompts and those that were drawn in place of others, of 64
    assert history(trainer, "refill/epochs")[-1] == pytest.approx((16 + trainer.num_refilled) / 64)
    assert trainer.num_refilled >= sum(history(trainer, "refill/prompts"))

    # where a whole epoch has no other prompt, one of the generation is drawn again
    trainer = built(tmp_path, model_path, REFILL, {"train_dataset": dataset(4)}, max_steps=2, save_strategy="no")
    trainer.train()
    assert history(trainer, "refill/prompts")[0] > 0


class Killed(Watching, DarsAndGuidanceTrainer):
    """kill -9 in a later draw of its generation, at one of its forward passes."""

    generation, killed_pass = 0, 0

    def complete_generation(self, generation_batch, rollouts, num_steps):
        if len(self.generations) == self.generation:
            forward, passes = self.model.forward, iter(range(1000))

            def counted(*args, **kwargs):
                if next(passes) == self.killed_pass:
                    os.kill(os.getpid(), signal.SIGKILL)
                return forward(*args, **kwargs)

            self.model.forward = counted
        return super().complete_generation(generation_batch, rollouts, num_steps)


def run_with_kills(directory, model_path, num_kills, seed, max_steps) -> list[int]:
    """Train in processes that are killed in later draws; what the killed ones returned. The last one saves the
    model."""
    rng, codes = random.Random(shifted(seed)), []
    settings = WEIGHTED | HINTS | REFILL | {"max_steps": max_steps}
    for attempt in range(num_kills + 1):
        where = (rng.randrange(2), rng.randrange(24)) if attempt < num_kills else (0, -1)
        child = os.fork()
        if child == 0:
            try:
                trainer = built(directory, model_path, settings, trainer_class=Killed)
                trainer.generation, trainer.killed_pass = where
                last = any(directory.glob("checkpoint-*/trainer_state.json")) or None
                trainer.train(resume_from_checkpoint=last)
                trainer.save_model()
                os._exit(0)
            finally:
                os._exit(1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return codes


@pytest.mark.slow
def test_a_run_that_is_killed_in_later_rollouts_ends_with_the_same_weights(tmp_path, model_path):
    codes = run_with_kills(tmp_path / "killed", model_path, 3, seed=1, max_steps=6)
    assert codes[-1] == 0 and -signal.SIGKILL in codes
    straight = built(tmp_path / "straight", model_path, WEIGHTED | HINTS | REFILL, max_steps=6, save_strategy="no")
    straight.train()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "killed", dtype=torch.float32)
    weights = trainable_weights(again)
    assert all(torch.equal(weight, weights[name]) for name, weight in trainable_weights(straight.model).items())
