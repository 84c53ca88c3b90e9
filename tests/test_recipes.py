"""Every shipped recipe is read as the run would read it, is free of conflicts, and says what the paper says.

The paper's settings stand below as their own table, so that a recipe that drifts is caught. Recipes are for GPUs and
ask for bfloat16; `pacs_trl.plan.check` reads them as values, without the configuration that asks this machine for a
GPU that can do it.
"""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from experiments.paper.command import read_table, table_names
from experiments.paper.published import TABLES
from pacs_trl.evaluation.arguments import EvaluationArguments
from pacs_trl.evaluation.benchmarks import BENCHMARKS
from pacs_trl.plan.check import check_recipe, find_conflicts, find_notes
from pacs_trl.plan.estimates import Estimate
from pacs_trl.plan.launch import read_launch
from pacs_trl.plan.sharding import Sharding
from pacs_trl.rewards import VerificationArguments


REPOSITORY = Path(__file__).parents[1]
RECIPES = REPOSITORY / "recipes"
SMALL = ("first_run", "images", "miniature", "smollm2-135m")  # folders of recipes for two CPU cores
TRAINING = sorted(
    str(path.relative_to(RECIPES).with_suffix(""))
    for path in RECIPES.rglob("*.yaml")
    if path.relative_to(RECIPES).parts[0] not in ("accelerate_configs", "evaluation", *SMALL)
)
MINIATURE = sorted(
    str(path.relative_to(RECIPES).with_suffix("")) for folder in SMALL for path in (RECIPES / folder).rglob("*.yaml")
)

# Table 4 of v2, the released scripts of v1, and what follows from them.
PAPER = dict(num_generations=8, learning_rate=1e-6, weight_decay=0.01, lr_scheduler_type="constant", warmup_steps=0)
PAPER |= dict(temperature=1.0, top_p=1.0, top_k=0, num_iterations=1, beta=0.0, dtype="float32", bf16=True)
PAPER |= dict(use_peft=False, dataset_name="deepscaler", reward_funcs=["math_reward"])
PAPER |= dict(verification_protocol="authors")
PAPER |= dict(vllm_importance_sampling_correction=False, mask_truncated_completions=False)
PAPER["prompt_instruction"] = "Please reason step by step, and put your final answer within \\boxed{}."
VERSIONS = {"v1": dict(max_prompt_length=512, max_completion_length=4096, system_prompt=None)}
VERSIONS["v2"] = dict(
    max_prompt_length=1024, max_completion_length=8192, chat_template_kwargs={"enable_thinking": True}
)
VERSIONS["v2"]["system_prompt"] = "You are a helpful assistant."
MODELS = {  # version, Hub id, rollout steps
    "qwen2.5-3b": ("v1", "Qwen/Qwen2.5-3B", 300),
    "qwen2.5-7b": ("v1", "Qwen/Qwen2.5-7B", 300),
    "qwen3-4b": ("v2", "Qwen/Qwen3-4B", 120),
    "qwen3-8b": ("v2", "Qwen/Qwen3-8B", 320),
}
PACS = dict(method="pacs", pacs_beta=1.0, score_estimator="rloo", class_weighting="balanced", reference="rollout")
PACS |= dict(actor_term_coef=0.0, proxy="log_ratio", max_grad_norm=0.0)
# The authors clip at 1.0 a gradient that is summed over the 8 rows of a micro-batch; TRL and PPOTrainer take their
# mean.
CLIPPED = dict(max_grad_norm=1.0 / 8, epsilon=0.2, epsilon_high=None, delta=3.0, loss_type="dr_grpo")
GRPO = CLIPPED | dict(method="grpo", scale_rewards="group", importance_sampling_level="token")
PPO = CLIPPED | dict(method="ppo", gamma=1.0, gae_lambda=1.0, whiten_advantages=True, value_clip_range=0.5)
PPO |= dict(critic_model_name_or_path=None, critic_learning_rate=1e-5, critic_warmup_steps=0)
NO_WEIGHT = PACS | dict(class_weighting="none")
SNAPSHOT = dict(reference="snapshot", reference_reset_steps=80, reset_optimizer_on_reference_reset=True)
CELLS = {  # name of the run -> its settings
    **{f"{m}/{name}": settings for m in MODELS for name, settings in (("pacs", PACS), ("grpo", GRPO), ("ppo", PPO))},
    **{f"{model}/pacs_no_weight": NO_WEIGHT for model in ("qwen2.5-7b", "qwen3-4b", "qwen3-8b")},
    **{f"{model}/pacs_beta_2": PACS | {"pacs_beta": 2.0} for model in ("qwen2.5-3b", "qwen2.5-7b")},
    **{f"qwen3-4b/beta_{beta}": PACS | {"pacs_beta": float(beta)} for beta in ("0.1", "0.5", "2", "10")},
    "qwen3-4b/score_dr_grpo": PACS | dict(score_estimator="dr_grpo"),
    "qwen3-4b/score_grpo_rollout": PACS | dict(score_estimator="grpo", first_update_score="dr_grpo"),
    "qwen3-4b/score_grpo_snapshot": PACS | SNAPSHOT | dict(score_estimator="grpo", max_grad_norm=1.0),
    "qwen3-4b/pacs_snapshot": PACS | SNAPSHOT,
    "qwen3-4b/pacs_one_node": PACS,
    "qwen3-4b/pacs_async": PACS | {"rollout_lag": 1},
    "qwen3-4b/pacs_kept_reference": PACS | dict(pacs_beta=0.3, reference="snapshot", reference_reset_steps=None),
    "qwen3-8b/pacs_server": PACS,
    "qwen3-8b/pacs_async": PACS | {"rollout_lag": 1},
}
# Which recipe makes them, and what is added to its launch line: the tables say it, and recipes/README.md where none
# does.
MADE_BY = {
    cell.run: (cell.recipe, cell.words)
    for name in table_names("full")
    for cell in read_table(name, "full").cells
    if cell.trained
}
IN_README = {
    "qwen3-4b/pacs_snapshot": (
        "qwen3-4b/pacs",
        "--reference snapshot --reference_reset_steps 80 --reset_optimizer_on_reference_reset true",
    ),
    "qwen2.5-3b/pacs_beta_2": ("qwen2.5-7b/pacs", "--model_name_or_path Qwen/Qwen2.5-3B --pacs_beta 2.0"),
    "qwen2.5-7b/pacs_beta_2": ("qwen2.5-7b/pacs", "--pacs_beta 2.0"),
}
COMPLETE = (
    *("qwen3-4b/pacs_one_node", "qwen3-4b/pacs_async", "qwen3-4b/pacs_kept_reference"),
    *("qwen3-8b/pacs_server", "qwen3-8b/pacs_async"),
)
MADE_BY |= {run: (recipe, added.split()) for run, (recipe, added) in IN_README.items()}
MADE_BY |= {recipe: (recipe, []) for recipe in COMPLETE}
DARS = "qwen2.5-math-7b/dars_b"
OBJECTIVES = ("real", "maxrl", "rloo")
GENAC = {"qwen3-4b/genac": 1e-6, "qwen3-8b/genac": 2e-7}  # learning rates of the critic
PRACTICAL = {
    "qwen3-0.6b/pacs": 1e-6,
    "qwen3-1.7b/pacs_lora": 1e-5,
    "qwen3-4b/code": 1e-6,
    "qwen3-4b/pacs_reuse": 1e-6,
    "qwen3-4b/pacs_continuous": 1e-6,
    "qwen2.5-7b/rlpr": 1e-6,
}  # learning rates


def launch_of(path: Path):
    """What the launch line of the header starts, checked for naming this very recipe."""
    header = [line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#")]
    words = shlex.split(next(line for line in header if line.startswith("accelerate launch")))
    assert words[words.index("--config") + 1] == str(path.relative_to(REPOSITORY))
    config = words[words.index("--config_file") + 1]
    processes = int(words[words.index("--num_processes") + 1]) if "--num_processes" in words else None
    launch, errors = read_launch(str(REPOSITORY / config), processes)
    assert errors == []
    return launch


def assert_settings(recipe, expected: dict) -> None:
    run, data, model, training, verification = recipe[:5]
    values = {k: v for k, v in vars(model).items() if k not in vars(training)}
    for part in (training, data, run, verification):
        values |= vars(part)
    actual = {name: getattr(value, "value", value) for name, value in values.items()}
    assert {key: actual[key] for key in expected} == expected


def read_without_conflicts(name: str, added=(), launch=None):
    """The recipe for its launch, which has neither conflicts nor notes, with words added to its launch line."""
    path = RECIPES / f"{name}.yaml"
    launch = launch or launch_of(path)
    recipe, conflicts = check_recipe(str(path), list(added), launch.num_processes)
    estimate = Estimate(recipe, launch)
    assert conflicts == find_conflicts(estimate) == find_notes(estimate) == []
    return recipe, launch, path.read_text()


@pytest.mark.parametrize("name", TRAINING)
def test_recipe_is_read_and_free_of_conflicts(name):
    recipe, launch, text = read_without_conflicts(name)
    step = recipe.step
    assert recipe.run.expected_processes == launch.num_processes
    several = {DARS: 2, "qwen3-4b/pacs_reuse": 2 * 4, "qwen3-4b/pacs_continuous": 1} | dict.fromkeys(GENAC, 1)
    assert step.updates_per_generation == several.get(name, 4)
    assert recipe.training.save_steps % step.updates_per_generation == 0
    assert recipe.training.output_dir == f"outputs/{name}"
    longest = recipe.data.max_prompt_length + recipe.training.max_completion_length
    longest += 2048 * (name in GENAC)  # the critic's template and answer
    assert recipe.training.vllm_mode == "server" or recipe.training.vllm_max_model_length == longest
    # the arithmetic that the comments do is the arithmetic of the run
    line = r"# +(?:generation|update): +(\d+) completions x (\d+) processes x (\d+) += (\d+)"
    rows = re.findall(line, text)
    assert [int(total) for *_, total in rows] == [step.completions_per_generation, step.completions_per_update]
    assert all(int(a) * int(b) * int(c) == int(total) for a, b, c, total in rows)
    assert not re.search(r"\d (GiB|hours)", text), f"recipes/{name}.yaml has an estimate; leave it to `plan`"


@pytest.mark.parametrize("name", MINIATURE)
def test_miniature_recipe_is_read_and_free_of_conflicts(name):
    other_model = ["--model_name_or_path", "org/model"]  # by a command that may not have been run
    recipe, _, text = read_without_conflicts(name, other_model, read_launch(None, 1)[0])
    others = {"miniature/dars_b": 2, "miniature/reuse": 8} | {
        f"miniature/{method}": 1
        for method in (
            "agent",
            "agent_continuous",
            "continuous",
            "environment",
            "code",
            "pacs",
            "grpo",
            "ucpo",
            *OBJECTIVES,
        )
    }
    others |= {} if name.startswith("miniature/") else {name: 1}
    updates = recipe.step.updates_per_generation
    assert updates == others.get(name, 4), (
        f"recipes/{name}.yaml has {updates} updates per generation. Write them into `others` of this test, if that is "
        "meant, or change steps_per_generation."
    )
    assert recipe.training.output_dir == f"outputs/{name}", f"recipes/{name}.yaml needs this output_dir"
    assert f"--config recipes/{name}.yaml" in text, f"The header of recipes/{name}.yaml needs its command"


@pytest.mark.parametrize("name", CELLS)
def test_cell_has_the_settings_of_the_paper(name):
    made_by, added = MADE_BY[name]
    version, hub_id, rollout_steps = MODELS[name.split("/")[0]]
    recipe, _, text = read_without_conflicts(made_by, added)
    assert_settings(recipe, PAPER | VERSIONS[version] | CELLS[name] | {"model_name_or_path": hub_id})
    assert recipe.step.completions_per_generation == 1024 * 8
    assert recipe.step.completions_per_update == 256 * 8
    assert recipe.training.max_steps == rollout_steps * 4
    assert ("--model_name_or_path" in added) or hub_id in text.splitlines()[0]


GRADES_ANSWERS = ("math_reward", "experiments.step_reward.step_reward")
WITHOUT_RESULTS = {"qwen3-0.6b/pacs", "qwen3-1.7b/pacs_lora"}  # neither published nor recorded: graded by the default


@pytest.mark.parametrize("name", [*TRAINING, *MINIATURE])
def test_a_recipe_with_results_names_the_protocol_that_graded_them(name):
    settings = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    if name not in WITHOUT_RESULTS and set(settings.get("reward_funcs", ())) & {*GRADES_ANSWERS}:
        has_number = name.startswith(("first_run/", "images/", "smollm2-135m/"))
        assert settings["verification_protocol"] == ("number" if has_number else "authors")
    else:
        assert "verification_protocol" not in settings


def test_there_is_a_recipe_for_each_cell_and_no_other():
    assert set(MADE_BY) == set(CELLS)
    assert set(TRAINING) == {recipe for recipe, _ in MADE_BY.values()} | set(PRACTICAL) | {DARS} | set(GENAC) | {
        f"qwen3-4b/{method}" for method in OBJECTIVES
    }


# experiments/DARS-{1.5B,7B}-{HW,ET}-Breadth.sh, but for the loss
OF_DARS = PACS | dict(method="dars", class_weighting="none")  # balanced weights would undo what the schedule does
OF_DARS |= dict(adaptive_rollouts="hardness_weighted", max_generations=64, adaptive_rollouts_budget=None)
OF_DARS |= dict(num_generations=8, num_iterations=2, max_prompt_length=1024, max_completion_length=3072)
OF_DARS |= dict(max_tokens_per_micro_batch=24576, temperature=1.0, learning_rate=5e-6, beta=0.0)
OF_DARS |= dict(max_steps=86 * 2, save_steps=14 * 2)
EQUAL_TREATMENT = {"adaptive_rollouts": "equal_treatment", "max_generations": 32}
OF_GENAC = dict(learning_rate=1e-6, epsilon=0.2, beta=0.0, num_generations=8, critic_max_new_tokens=1024)
OF_GENAC |= dict(segment_probability=0.2, max_segments=16, critic_pretraining_steps=100, gamma=1.0)
OF_GENAC |= dict(gae_lambda=1.0, critic_prompt="genac")
RELATED = [  # recipe, what is added to its launch line, settings
    (DARS, [], OF_DARS),
    (DARS, ["--model_name_or_path", "Qwen/Qwen2.5-Math-1.5B"], OF_DARS),
    (DARS, [f"--{key}={value}" for key, value in EQUAL_TREATMENT.items()], OF_DARS | EQUAL_TREATMENT),
    *((name, [], OF_GENAC | {"critic_learning_rate": rate}) for name, rate in GENAC.items()),
    *(
        (name, [], PACS | dict(learning_rate=rate, use_peft=name.endswith("lora")))
        for name, rate in PRACTICAL.items()
        if name != "qwen2.5-7b/rlpr"
    ),
    ("qwen2.5-7b/rlpr", [], PACS | dict(method="rlpr", learning_rate=PRACTICAL["qwen2.5-7b/rlpr"], use_peft=False)),
]


@pytest.mark.parametrize(("name", "added", "expected"), RELATED)
def test_recipe_has_the_settings_of_its_authors_or_of_pacs(name, added, expected):
    recipe, _, _ = read_without_conflicts(name, added)
    assert_settings(recipe, expected)
    if name == DARS:
        assert recipe.step.prompts_per_generation == recipe.step.prompts_per_update == 3072


@pytest.mark.parametrize("path", sorted((RECIPES / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_files_have_known_keys_and_the_stated_processes_and_sharding(path):
    config = load_config_from_file(str(path))  # accelerate raises on unknown keys
    launch, errors = read_launch(str(path), None)
    assert errors == []
    expected = {
        "single_gpu": (1, Sharding()),
        "ddp": (8, Sharding("ddp")),
        "fsdp2": (8, Sharding("fsdp", 8, wraps_kl_model_whole=True)),
        "fsdp2_8x8": (64, Sharding("fsdp", 64, wraps_kl_model_whole=True)),
        "zero2": (8, Sharding("deepspeed", 8, zero_stage=2)),
        "zero3": (8, Sharding("deepspeed", 8, zero_stage=3)),
    }
    assert (launch.num_processes, launch.sharding) == expected[path.stem]
    assert config.mixed_precision == "bf16"
    assert f"--config_file recipes/accelerate_configs/{path.name}" in path.read_text()
    if "fsdp" in path.stem:
        assert config.fsdp_config["fsdp_version"] == 2
        # otherwise a checkpoint is shards that nothing but FSDP can read
        assert config.fsdp_config["fsdp_state_dict_type"] == "FULL_STATE_DICT"


# Section 4.1 of v2; of v1 the table heads, scripts/inference.sh and, for n, which no source states, the grid of its
# numbers.
FIVE = "math_500,amc_23,aime_2024,aime_2025,beyond_aime"
PROTOCOLS = {
    "v1": ("amc_23,aime_2024,aime_2025", 512, [1, 8, 32, 64, 128, 256], 0.6, 0.95, 4096),
    "v1_math_500": ("math_500", 32, [1, 2, 4, 8, 16, 32], 0.6, 0.95, 4096),
    "v2": (FIVE, 128, [1, 4, 8, 16, 32, 64], 0.6, 0.95, 8192),
}
PROTOCOLS["table1"] = PROTOCOLS["v2"]
MAX_PROBLEMS = {"miniature": 250, "miniature_tables": 40, "smollm2_sums": 64}
OTHER_EVALUATIONS = {*MAX_PROBLEMS, "first_run", "gpqa_diamond", "livecodebench"}
EVALUATIONS = sorted(
    str(path.relative_to(RECIPES / "evaluation").with_suffix("")) for path in (RECIPES / "evaluation").rglob("*.yaml")
)


def evaluation(name: str) -> EvaluationArguments:
    """The recipe as `pacs-trl evaluate` reads it, with a model and a directory where the command line has to name
    them."""
    settings = yaml.safe_load((RECIPES / "evaluation" / f"{name}.yaml").read_text())
    verification = VerificationArguments(
        **{key: settings.pop(key) for key in list(settings) if key.startswith(("code_", "verification_"))}
    )
    if name != "livecodebench":  # programs are run
        expected = "number" if name in ("first_run", "smollm2_sums") else "authors"
        assert verification.verification_protocol == expected
    return EvaluationArguments(**{"model": "MODEL", "output_dir": "DIR"} | settings)


@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluation_has_the_protocol_of_the_paper(name):
    read = evaluation(name)
    assert f"--config recipes/evaluation/{name}.yaml" in (RECIPES / "evaluation" / f"{name}.yaml").read_text()
    assert read.top_k == 0 and read.max_problems == MAX_PROBLEMS.get(name)
    if name not in OTHER_EVALUATIONS:
        values = (read.benchmarks, read.n, read.ks, read.temperature, read.top_p, read.max_new_tokens)
        assert values == PROTOCOLS[name.partition("/")[0]]
        assert read.prompt_instruction == PAPER["prompt_instruction"]
        # C.1 of v2 prints the turn for Qwen3; the templates of the other models bring their own, or none
        qwen3 = name == "v2" or name.startswith("table1/qwen3")
        names = read.benchmarks.split(",")
        tables = [table for table in TABLES if table.protocol == name[:2] and table.benchmark in names]
        assert set(names) <= set(BENCHMARKS)
        assert all(read.ks == sorted(next(iter(table.values.values()))) for table in tables)
        assert read.system_prompt == (VERSIONS["v2"]["system_prompt"] if qwen3 else None)
