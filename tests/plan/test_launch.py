"""The launch that an accelerate file describes, and what accelerate would refuse or ignore."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.runs import config

from pacs_trl.plan.launch import read_launch
from pacs_trl.plan.sharding import Sharding


SINGLE_GPU = str(Path(__file__).parents[2] / "recipes/accelerate_configs/single_gpu.yaml")
FSDP, ZERO = ("distributed_type: FSDP", "num_processes: 8"), ("distributed_type: DEEPSPEED", "num_processes: 8")

FILES = [
    ((), "launch.yaml"),
    (("a: [1", "b: }"), "launch.yaml"),
    (("distributed_typ: FSDP", "num_processes: 8"), "distributed_type"),
    ((*FSDP, "zzz: 1"), "zzz"),
    (("num_processes: 8",), "distributed_type"),
    (("distributed_type: NO",), "distributed_type is False"),
    (("distributed_type: {FSDP: 2}", "num_processes: 8"), "unhashable|distributed_type"),
    (FSDP[:1], "num_processes"),
    ((FSDP[0], "num_processes: -1"), "num_processes"),
    ((*FSDP, "fsdp_config: {fsdp_verson: 2}"), "fsdp_verson"),
    ((*FSDP, "fsdp_config: {fsdp_version: two}"), "two"),
    (
        (*FSDP, "fsdp_config: {fsdp_sharding_strategy: SOME}"),
        r"fsdp_sharding_strategy is 'SOME'\. Set .*SHARD_ZERO2\.$",
    ),
    (
        (*FSDP, "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: 4}"),
        r"fsdp_reshard_after_forward is '4'\. ",
    ),
    (
        (*FSDP, "fsdp_config: {fsdp_offload_params: some}"),
        r"fsdp_offload_params is 'some'\. Set it to true or false\.$",
    ),
    ((*ZERO, "deepspeed_config: {zero_stage: 5}"), "5"),
    ((*ZERO, "deepspeed_config: {zero_stag: 3}"), "zero_stag"),
    ((*ZERO, "deepspeed_config: {deepspeed_config_file: no/such.json}"), "deepspeed_config_file"),
    ((*FSDP, "parallelism_config: {parallelism_config_tp_size: 2}"), "parallelism_config_tp_size=2"),
    ((*FSDP, "parallelism_config: {parallelism_config_cp_size: 8}"), "parallelism_config_cp_size=8"),
    ((*FSDP, "parallelism_config: {parallelism_config_sp_size: 8}"), "parallelism_config_sp_size=8"),
    ((*FSDP, "parallelism_config: {tp_size: 2}"), "ignores tp_size"),
    *[
        (
            (*FSDP, f"parallelism_config: {{{', '.join(f'parallelism_config_dp_{s}' for s in sizes)}}}"),
            r"times parallelism_config_dp_shard_size=\d must be the 8 processes, with a shard size above 1\. Correct",
        )
        for sizes in (["replicate_size: 3"], ["replicate_size: 2"], ["replicate_size: 8"], ["shard_size: 4"])
    ],
    ((*FSDP, "parallelism_config: {parallelism_config_dp_replicate_size: 3}"), "dp_replicate_size=3 times"),
]


@pytest.mark.parametrize(("lines", "key"), FILES)
def test_files_that_cannot_be_launched(launch_file, lines, key):
    launch, errors = read_launch(launch_file(*lines), None)
    assert launch is None
    with pytest.raises(ValueError, match=key):
        raise ValueError(*errors)


STAGES = [(0, 0), (1, 1), (2, 2), (3, 3), (None, 2)]  # accelerate's default: 2


@pytest.mark.parametrize(("stage", "expected"), STAGES)
def test_sharding_is_read_from_stages_and_versions(launch_file, stage, expected):
    config = "{}" if stage is None else f"{{zero_stage: {stage}}}"
    launch, _ = read_launch(launch_file(*ZERO, f"deepspeed_config: {config}"), None)
    assert launch.sharding == Sharding("deepspeed", 8, zero_stage=expected)
    for line, version in (("fsdp_config: {fsdp_version: 2}", 2), ("fsdp_config: {version: 2}", 2), ("", 1)):
        assert read_launch(launch_file(*FSDP, line), None)[0].fsdp_version == version


LAYOUTS = {  # lines of the accelerate file for 16 processes on two machines, and the sharding that they mean
    "FSDP 1": (FSDP[0], "fsdp_config: {}", Sharding("fsdp", 16)),
    "gathered until the backward pass": (
        *(FSDP[0], "fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}"),
        Sharding("fsdp", 16, keeps_gathered=True),
    ),
    "a whole state on each process": (FSDP[0], "fsdp_config: {fsdp_sharding_strategy: NO_SHARD}", Sharding("fsdp", 1)),
    "a state on each node": (FSDP[0], "fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}", Sharding("fsdp", 8)),
    "a strategy by its number": (
        *(FSDP[0], "fsdp_config: {fsdp_sharding_strategy: 5}"),
        Sharding("fsdp", 8, keeps_gathered=True),
    ),
    "FSDP 2 has no strategies": (
        *(FSDP[0], "fsdp_config: {fsdp_version: 2, fsdp_sharding_strategy: NO_SHARD}"),
        Sharding("fsdp", 16, wraps_kl_model_whole=True),
    ),
    "FSDP 2, gathered until the backward pass": (
        *(FSDP[0], "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}"),
        Sharding("fsdp", 16, keeps_gathered=True, wraps_kl_model_whole=True),
    ),
    "FSDP, offloaded": (
        *(FSDP[0], "fsdp_config: {fsdp_version: 2, fsdp_offload_params: true}"),
        Sharding("fsdp", 16, wraps_kl_model_whole=True, offloads_weights=True, offloads_optimizer=True),
    ),
    "ZeRO, optimizer offloaded": (
        *(ZERO[0], "deepspeed_config: {zero_stage: 1, offload_optimizer_device: cpu, offload_param_device: cpu}"),
        Sharding("deepspeed", 16, zero_stage=1, offloads_optimizer=True),  # weights only in stage 3
    ),
    "ZeRO, all offloaded": (
        *(ZERO[0], "deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu, offload_param_device: nvme}"),
        Sharding("deepspeed", 16, zero_stage=3, offloads_weights=True, offloads_optimizer=True),
    ),
}


@pytest.mark.parametrize(("kind", "config", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_are_read_from_the_keys_of_the_file(launch_file, kind, config, expected):
    launch, errors = read_launch(launch_file(kind, config, "num_processes: 16", "num_machines: 2"), None)
    assert errors == [] and launch.sharding == expected


def test_truth_values_are_those_that_accelerate_takes(launch_file):
    config = "fsdp_config: {fsdp_version: 2, fsdp_offload_params: 1, fsdp_reshard_after_forward: 'on'}"
    sharding = read_launch(launch_file(*FSDP, config), None)[0].sharding
    assert sharding == Sharding("fsdp", 8, wraps_kl_model_whole=True, offloads_weights=True, offloads_optimizer=True)


def test_processes_that_only_share_data_may_be_grouped(launch_file):
    sizes = "parallelism_config: {parallelism_config_dp_shard_size: 8, parallelism_config_tp_size: 1}"
    assert read_launch(launch_file(*FSDP, "fsdp_config: {fsdp_version: 2}", sizes), None)[1] == []


def test_a_replicated_state_is_divided_by_the_processes_of_a_replica(plan, launch_file):
    """Two replicas on 8 processes need the memory per process of one replica on 4."""
    version = "fsdp_config: {fsdp_version: 2}"
    sizes = "parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 4}"

    def state(count: int, *lines: str) -> str:
        file = launch_file("distributed_type: FSDP", f"num_processes: {count}", version, *lines)
        (line,) = [line for line in plan("--accelerate_config", file)[1].splitlines() if "training state  " in line]
        return line

    assert state(8, sizes) == state(4) != state(8)


def test_files_and_numbers_that_do_not_fit():
    for file, count in (("no/such.yaml", None), ("recipes/miniature/pacs.yaml", None), (SINGLE_GPU, 2), (None, 0)):
        launch, errors = read_launch(file, count)
        assert launch is None and len(errors) == 1 and "Error" not in errors[0]


FSDP_OF_RECIPE = {
    "version 2 by default": ({"fsdp": True}, Sharding("fsdp", 16, wraps_kl_model_whole=True), 2),
    "kept and offloaded": (
        {"fsdp": True, "fsdp_config": {"reshard_after_forward": False, "cpu_offload": True}},
        Sharding(
            *("fsdp", 16),
            keeps_gathered=True,
            wraps_kl_model_whole=True,
            offloads_weights=True,
            offloads_optimizer=True,
        ),
        2,
    ),
    "version 1": ({"fsdp": True, "fsdp_config": {"version": 1}}, Sharding("fsdp", 16), 1),
}


@pytest.mark.parametrize(("settings", "sharding", "version"), FSDP_OF_RECIPE.values(), ids=FSDP_OF_RECIPE)
def test_fsdp_of_a_recipe_is_that_of_its_run(tmp_path, settings, sharding, version):
    args = config(tmp_path, **settings)
    launch = read_launch(None, 16)[0].with_settings_of(args)
    assert (launch.kind, launch.fsdp_version, launch.sharding) == ("FSDP", version, sharding)
    assert launch.description == f"16 processes, FSDP {version} of the recipe"
    assert read_launch(None, 16)[0].with_settings_of(config(tmp_path)) == read_launch(None, 16)[0]


def test_fsdp_of_a_recipe_comes_before_that_of_the_launch(tmp_path, launch_file):
    """Keys that the recipe does not set stay: two nodes share the state on each, in version 1, and offload it."""
    keys = "fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD, fsdp_offload_params: true}"
    launch, _ = read_launch(launch_file(FSDP[0], keys, "num_processes: 16", "num_machines: 2"), None)
    first = launch.with_settings_of(config(tmp_path, fsdp=True, fsdp_config={"version": 1}))
    assert first.sharding == Sharding("fsdp", 8, offloads_weights=True, offloads_optimizer=True)
    second = launch.with_settings_of(config(tmp_path, fsdp=True, fsdp_config={"activation_checkpointing": True}))
    assert second.fsdp_version == 2 and second.sharding.processes == 16 and second.fsdp_recomputes


def test_deepspeed_of_a_recipe_comes_before_that_of_the_launch(launch_file):
    plugin = SimpleNamespace(zero_stage=3, offload_param_device="cpu", offload_optimizer_device="none")
    training = SimpleNamespace(deepspeed="zero3.json", deepspeed_plugin=plugin)
    for launch in (read_launch(None, 8)[0], read_launch(launch_file(*FSDP), None)[0]):
        launch = launch.with_settings_of(training)
        assert launch.sharding == Sharding("deepspeed", 8, zero_stage=3, offloads_weights=True)
        assert launch.kind == "DEEPSPEED" and launch.is_zero3 and launch.fsdp_version is None
        assert launch.description == "8 processes, DeepSpeed ZeRO-3 of the recipe"


def test_plan_reads_fsdp_of_the_recipe(plan, launch_file):
    """As from an accelerate file; one process cannot shard."""

    def state(*arguments: str, **changes) -> str:
        (line,) = [line for line in plan(*arguments, **changes)[1].splitlines() if "training state  " in line]
        return line

    file = launch_file(*FSDP, "fsdp_config: {fsdp_version: 2}")
    assert state("--num_processes", "8", fsdp=True) == state("--accelerate_config", file)
    assert state("--num_processes", "8", fsdp=True) != state("--num_processes", "8")
    status, output = plan(fsdp=True)
    assert status == 1 and "fsdp shards over processes, and this is one." in output
    settings = {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}, "gradient_checkpointing": "auto"}
    status, output = plan("--num_processes", "8", **settings)
    assert status == 1 and "Set the latter to false, in the accelerate file or in fsdp_config." in output
