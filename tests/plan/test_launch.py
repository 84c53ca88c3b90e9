"""The launch that an accelerate file describes: what is read from it, and what accelerate would refuse or ignore."""

import json
import re
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from pacs_trl.plan.launch import read_launch


SINGLE_GPU = str(Path(__file__).parents[2] / "recipes/accelerate_configs/single_gpu.yaml")
FSDP, ZERO = ("distributed_type: FSDP", "num_processes: 8"), ("distributed_type: DEEPSPEED", "num_processes: 8")
MISSPELT, UNKNOWN = "distributed_typ: FSDP", "(that )?it does not know.* Rename"
SECTIONS = ("fsdp_config: {fsdp_version: [2]}", "deepspeed_config: {zero_stage: [3]}")


def refusal(file: str, num_processes: int | None = None) -> str:
    launch, errors = read_launch(file, num_processes)
    assert launch is None
    return " ".join(errors)


FILES = [
    ((), "must be a YAML mapping of settings, got nothing"),
    (("a: [1", "b: }"), "is not YAML: while parsing"),
    ((MISSPELT, "num_processes: 8"), f"refuses keys {UNKNOWN} `distributed_typ` to `distributed_type`, or remove it."),
    ((FSDP[0], "zzz: 1"), "Remove `zzz`."),
    (("num_processes: 8",), "distributed_type None is not planned for"),
    (("distributed_type: NO",), "distributed_type False is not planned for .*write 'NO'"),
    (("distributed_type: {FSDP: 2}", "num_processes: 8"), "distributed_type must be one word or number"),
    (FSDP[:1], "num_processes must be at least 1, got None. Set it there or with --num-p"),
    ((FSDP[0], "num_processes: -1"), "num_processes must be at least 1, got -1"),
    ((FSDP[0], "num_processes: true"), "num_processes must be at least 1, got True"),
    (("distributed_type: 'NO'", "mixed_precision: no"), "got False .*write 'no'"),
    (
        (*FSDP, "fsdp_config: {fsdp_verson: 2}"),
        f"ignores keys of fsdp_config {UNKNOWN} `fsdp_verson` to `fsdp_version`",
    ),
    ((*FSDP, "fsdp_config: {fsdp_version: two}"), "must be 1 or 2, got 'two'"),
    ((*ZERO, "deepspeed_config: {zero_stage: 5}"), "the zero_stage must be 0, 1, 2 or 3, got 5"),
    ((*ZERO, "deepspeed_config: {deepspeed_config_file: 5}"), "deepspeed_config_file 5 does not exist"),
    (
        (*ZERO, "deepspeed_config: {zero_stag: 3}"),
        f"ignores .* deepspeed_config {UNKNOWN} `zero_stag` to `zero_stage`",
    ),
    # all at once
    (("distributed_type: [FSDP]", "num_processes: [8]", "mixed_precision: [bf16]", *SECTIONS),
     r"distributed_type must be one word .* \['FSDP'\].* num_processes must be one word or number, got \[8\].* "
     "mixed_precision must be one .* fsdp_config.fsdp_version must be one .* deepspeed_config.zero_stage must be one"),
    ((FSDP[0], "num_processes: 0", "mixed_precision: half", "fsdp_config: {verson: two}"),
     "num_processes must be .* mixed_precision must be .* got 'half'.* Rename `fsdp_verson` to `fsdp_version`, or"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "words"), FILES)
def test_files_that_cannot_be_launched(launch_file, lines, words):
    assert re.search(words, refusal(launch_file(*lines)))


@pytest.mark.parametrize("lines", [(MISSPELT, "num_processes: 8"), ("num_processes: 8",), ()])
def test_accelerate_refuses_them_too(launch_file, lines):
    with pytest.raises((ValueError, AttributeError)):
        load_config_from_file(launch_file(*lines))


@pytest.mark.parametrize("key", ["fsdp_version", "version"])
def test_fsdp_version(launch_file, key):
    assert read_launch(launch_file(*FSDP, f"fsdp_config: {{{key}: 2}}"), None)[0].fsdp_version == 2
    assert read_launch(launch_file(*FSDP), None)[0].fsdp_version == 1


STAGES = [(0, "none"), (1, "gradients"), (2, "gradients"), (3, "full"), (None, "gradients")]


@pytest.mark.parametrize(("stage", "sharding"), STAGES)
def test_zero_stage(launch_file, tmp_path, stage, sharding):
    """accelerate's default is 2. In a file of DeepSpeed the stage must stand."""
    config = "{}" if stage is None else f"{{zero_stage: {stage}}}"
    assert read_launch(launch_file(*ZERO, f"deepspeed_config: {config}"), None)[0].sharding == sharding
    deepspeed = tmp_path / "deepspeed.json"
    deepspeed.write_text(json.dumps({"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}))
    file = launch_file(*ZERO, f"deepspeed_config: {{deepspeed_config_file: {deepspeed}}}")
    if stage is None:
        assert "the stage of zero_optimization must be 0, 1, 2 or 3, got None" in refusal(file)
    else:
        launch, _ = read_launch(file, None)
        assert (launch.sharding, launch.kind, launch.mixed_precision) == (sharding, "DEEPSPEED", "bf16")


def test_files_and_numbers_that_do_not_fit(launch_file, tmp_path):
    assert "does not exist" in refusal("no/such.yaml")
    assert "pacs.yaml is a recipe (it has the key `dataset_name`)" in refusal("recipes/miniature/pacs.yaml")
    assert "num_processes is 2" in refusal(SINGLE_GPU, 2)
    deepspeed = tmp_path / "deepspeed.json"
    file = launch_file(*ZERO, f"deepspeed_config: {{deepspeed_config_file: {deepspeed}}}")
    assert re.search("does not exist .* ZeRO stage is not known. Correct the path", refusal(file))
    deepspeed.write_text("{")
    assert "is not JSON" in refusal(file)
    section = f"deepspeed_config: {{zero_stage: 2, deepspeed_config_file: {deepspeed}}}"
    file = launch_file(*ZERO, "mixed_precision: bf16", section)
    assert "accelerate refuses zero_stage, mixed_precision next to deepspeed_config" in refusal(file)
