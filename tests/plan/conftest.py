"""The command on one recipe with changes."""

import socket

import pytest
import yaml

from pacs_trl.plan.check import main
from pacs_trl.plan.estimates import Estimate
from pacs_trl.plan.launch import Launch
from pacs_trl.plan.sharding import Sharding
from pacs_trl.recipe import Recipe


RECIPE = {
    "method": "pacs", "model_name_or_path": "Qwen/Qwen3-4B", "dataset_name": "deepscaler",
    "dtype": "float32", "bf16": True, "learning_rate": 1e-6, "max_completion_length": 1000,
    "num_generations": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4,
    "steps_per_generation": 16, "max_steps": 480, "save_steps": 80,
}  # fmt: skip


@pytest.fixture
def plan(tmp_path, capsys, monkeypatch, request):
    """Run the command on `RECIPE` with changes (`None` removes a key), without network; return status and output."""
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail("plan must not use the network"))
    monkeypatch.chdir(request.config.rootpath)

    def run(*arguments: str, **changes) -> tuple[int, str]:
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump({k: v for k, v in (RECIPE | changes).items() if v is not None}))
        status = main(["--config", str(file), *arguments])
        return status, capsys.readouterr().out

    return run


@pytest.fixture
def estimate_of():
    """The estimate of `RECIPE` with changes on 64 processes with FSDP2."""

    def estimate(**changes) -> Estimate:
        settings = {key: value for key, value in (RECIPE | changes).items() if value is not None}
        recipe = Recipe.from_settings(settings, 64)
        sharding = Sharding("fsdp", 64, wraps_kl_model_whole=True)
        return Estimate(recipe, Launch(64, sharding, "64 processes", "FSDP", 2, "bf16"))

    return estimate
