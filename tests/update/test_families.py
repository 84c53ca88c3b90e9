"""docs/compatibility.md says of thirty families how their completions are computed."""

import importlib.metadata

import families
import pytest
import torch
from support.models import TOKENIZER
from support.runs import build_trainer

from pacs_trl import GRPOTrainer


FAILS = {"llama4"} if importlib.metadata.version("transformers") > "5.18" else set()  # in transformers 5.24 itself


def test_page_has_every_family_once():
    names = [family["model_type"] for family in families.FAMILIES]
    assert len(names) == len(set(names)) == 30
    assert [line.split("`")[1] for line in families.documented().splitlines()[2:]] == names


@pytest.mark.parametrize(
    "name", [*("gemma3", "qwen2_5_vl"), pytest.param("all", marks=pytest.mark.slow, id="every family")]
)
def test_page_is_what_tiny_models_do(name):
    documented = families.documented().splitlines()[2:]
    for family, line in zip(families.FAMILIES, documented, strict=True):
        if name in (family["model_type"], "all") and family["model_type"] not in FAILS:
            assert families.row(family) == line, "run `python tests/families.py`"


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family["model_type"])
def test_every_family_trains_and_resumes_bit_by_bit(tmp_path, family):
    sizes = {"vocab_size": len(TOKENIZER)}
    families.model_of({**family, "config": family.get("config", {}) | sizes}).save_pretrained(tmp_path / "model")
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "router_aux_loss_coef": 0.0}
    straight, resumed = (
        build_trainer(tmp_path / name, model=str(tmp_path / "model"), trainer_class=GRPOTrainer, **settings)
        for name in ("straight", "resumed")
    )
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-1"))
    weights = resumed.model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in straight.model.state_dict().items())
