"""Eight processes end with the weights of one: DDP, FSDP2, hybrid sharding, ZeRO-3, and four with LoRA."""

import eight
import pytest
import torch
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file
from support.models import relative_error
from support.optional_packages import require
from support.processes import on_several, run_and_save
from transformers import AutoModelForCausalLM


pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.trains]

ENVIRONMENT = {
    "hybrid": {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"},
    "zero3": {"ACCELERATE_USE_CPU": "false", "ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"},
}
KINDS = ["ddp", "fsdp2", "hybrid", "zero3"]
_launches: dict[str, tuple | None] = {}


@pytest.fixture(scope="module")
def launch(tmp_path_factory, model_path):
    """Return the results of all scenarios of a kind on eight processes, from one launch, and their directory."""

    def launched(kind: str, number: int = 8):
        if kind == "zero3":
            require("deepspeed")
        if kind not in _launches:
            directory = tmp_path_factory.mktemp(kind)
            _launches[kind] = None  # if it fails, it is not launched again
            arguments = eight.run_all, (directory, kind, model_path), directory
            on_several(number, run_and_save, *arguments, outputs=directory, **ENVIRONMENT.get(kind, {}))
            _launches[kind] = torch.load(directory / "result.0"), directory
        assert _launches[kind] is not None, f"the launch of {kind} has failed"
        return _launches[kind]

    yield launched
    _launches.clear()


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Return the results of one process, by scenario."""
    directory, results = tmp_path_factory.mktemp("one"), {}

    def train(name: str, run, *arguments, **settings):
        if name not in results:
            results[name] = run(directory, *arguments, **settings)
        return results[name]

    return train


def assert_same_run(result: dict, expected: dict) -> None:
    """Compare the change of the weights, and the losses."""
    change = {name: weights - expected["start"][name] for name, weights in expected["final"].items()}
    assert any(part.any() for part in change.values())
    assert relative_error({name: result["final"][name] - expected["start"][name] for name in change}, change) < 1e-5
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", eight.SCENARIOS)
@pytest.mark.parametrize("kind", KINDS)
def test_eight_processes_end_with_the_weights_of_one(launch, one, model_path, kind, name):
    results, directory = launch(kind)
    assert_same_run(results[name], one(name, eight.run, name, 1, model_path))
    if kind == "zero3":  # saves the parts of its processes, without stage3_gather_16bit_weights_on_model_save
        return
    saved = directory / name / "saved"
    if (shards := saved / "pytorch_model_fsdp_0").is_dir():
        merge_fsdp_weights(str(shards), str(saved))
        weights = load_file(saved / "model.safetensors")
    else:
        weights = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    assert all(torch.equal(weights[key], final) for key, final in results[name]["final"].items())


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hybrid"])
def test_ppo_on_eight_processes_equals_one(launch, one, model_path, kind):
    assert_same_run(launch(kind)[0]["PPO"], one("PPO", eight.run_ppo, 1, model_path))


@pytest.mark.parametrize("name", ["PACS, snapshot", "GRPO, four updates"])
def test_lora_on_four_processes_equals_one(launch, one, model_path, name):
    assert_same_run(launch("lora", 4)[0][name], one(f"LoRA {name}", eight.run, name, 1, model_path, lora=True))


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_on_eight_processes_equals_one(launch, one, kind):
    assert launch(kind)[0]["evaluation"] == pytest.approx(one("evaluation", eight.evaluate, 1), rel=1e-5)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_run_of_eight_continues_on_six_and_on_two_and_back(launch, tmp_path, kind):
    results, directory = launch(kind)
    checkpoint = directory / "straight" / "checkpoint-3"
    for number, step in ((6, 4), (2, 5), (8, None)):
        on_several(
            number, run_and_save, eight.continue_all, (tmp_path, kind, str(checkpoint)), tmp_path, outputs=tmp_path
        )
        assert_same_run(torch.load(tmp_path / "result.0"), results["straight"])
        checkpoint = tmp_path / f"continued by {number}" / f"checkpoint-{step}"
