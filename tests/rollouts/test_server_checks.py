"""Checks before a run with vLLM: its version, ports, and the server, also one that is to generate continuously."""

import socket
from contextlib import nullcontext

import pytest
import torch
from huggingface_hub.utils import httpx
from support.continuous_refusals import SETTINGS, assert_continuous_is_refused
from support.models import LORA, tiny_model
from support.runs import build_trainer, config
from support.vllm_server import LoopbackVLLM, play_installed, server_settings

from pacs_trl.rollouts import server_checks, worker_checks
from pacs_trl.rollouts.server_checks import check_vllm, shares_memory
from pacs_trl.rollouts.server_command import continuous_server_command, serve_command, training_dtype
from pacs_trl.settings import names


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    play_installed(monkeypatch.setattr)
    monkeypatch.setattr(worker_checks, "find_spec", lambda name: True)


@pytest.fixture
def server(model_path):
    with LoopbackVLLM(model_path) as server:
        yield server


@pytest.mark.parametrize("version", ["0.22.0", "0.31.2+cpu", "0.27.1rc1", "dev", "0.21.9", "0.32.0", "1.0.0", None])
def test_versions_that_trl_does_not_drive_are_refused(monkeypatch, version):
    monkeypatch.setattr(names, "installed_vllm", lambda: version)
    is_driven = version == "dev" or (version or "").startswith(("0.22", "0.27", "0.31"))
    with nullcontext() if is_driven else pytest.raises(ValueError, match=f"vLLM {version or 'is not'}"):
        names.require_vllm("wait")


def test_the_version_is_checked_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(names, "installed_vllm", lambda: "0.12.0")
    with pytest.raises(ValueError, match="vLLM 0.12.0"):
        build_trainer(tmp_path, model="no/such-model", use_vllm=True)


def test_a_master_port_in_use_is_refused_unless_torchrun_holds_it(tmp_path, monkeypatch):
    """By torchrun, which holds it for this run, or by another process."""
    args = config(tmp_path, use_vllm=True, vllm_mode="colocate")
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        with pytest.raises(ValueError, match="MASTER_PORT="):
            check_vllm(args, "model")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        check_vllm(args, "model")


def test_a_server_that_does_not_answer_is_reported_with_its_command(tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    args = config(tmp_path, use_vllm=True, vllm_server_base_url=url, vllm_server_timeout=0.2, vllm_mode="server")
    with pytest.raises(ValueError, match=rf"No vLLM server answers at {url} after 0.2 s.*vllm serve Qwen/X"):
        check_vllm(args, "Qwen/X")


REFUSED = {
    "something else answers": ({"answers": {"/v1/models": 404}}, "No vLLM server answers .*404.*/v1/models"),
    "not healthy": ({"dead": True}, "No vLLM server answers .*503.*/health"),
    "another model": (
        {"models": {"data": [{"id": "Qwen/Other"}]}},
        "serves 'Qwen/Other', but this run trains .*--served-model-name",
    ),
}


@pytest.mark.parametrize(("state", "message"), REFUSED.values(), ids=REFUSED)
def test_a_server_that_cannot_serve_the_run_is_refused(tmp_path, server, model_path, state, message):
    vars(server).update(state)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        check_vllm(config(tmp_path, **server_settings(server.url)), model_path)


def test_a_server_that_serves_the_model_passes(tmp_path, server, model_path):
    server.models["data"][0]["id"] = "another name"  # its root is the model
    check_vllm(config(tmp_path, **server_settings(server.url)), model_path)
    assert server.calls == ["/health", "/v1/models"]


# Continuous rollouts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallel_config": {}, "weight_transfer_config": None}, "neither our worker extension nor the NCCL backend"),
        ({"model_config": {"dtype": "torch.bfloat16"}}, "computes in bfloat16, and training in float32"),
        ({"model_config": {"max_model_len": 20}}, "a context of 20 tokens, and prompts with completions have"),
        ({"model_config": {"logprobs_mode": "raw_logprobs"}}, "reports raw_logprobs"),
        ({"scheduler_config": {"stream_interval": 4}}, "--stream-interval"),
        ({"scheduler_config": {"max_num_batched_tokens": 2048}}, "Add --max-num-batched-tokens 8192"),
    ],
    ids=str,
)
def test_a_server_that_cannot_generate_continuously_is_refused(tmp_path, server, model_path, change, message):
    config = server.info["vllm_config"]
    for part, values in change.items():
        config[part] = values if part not in ("model_config", "scheduler_config") else config[part] | values
    assert_continuous_is_refused(
        tmp_path, server, model_path, f"The vLLM server at {server.url} .*{message}.*--worker-extension-cls"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_config": None}, "serves no adapters"),
        ({"lora_config": {"max_lora_rank": 4, "max_loras": 8}}, "adapters of at most rank 4, and this run needs 8"),
        ({"lora_config": {"max_lora_rank": 8, "max_loras": 5}}, "with 5 adapters at the same time.*needs 6"),
        ({"parallel_config": {"data_parallel_size": 2}}, "has 2 replicas"),
        (None, "does not load adapters while it runs"),
    ],
    ids=str,
)
def test_a_server_that_cannot_get_an_adapter_for_each_version_is_refused(
    tmp_path, server, model_path, change, message
):
    if change is None:
        server.answers["/v1/load_lora_adapter"] = 404
    else:
        server.info["vllm_config"] |= change
    command = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 .*--enable-lora --max-lora-rank 8 --max-loras 6"
    settings = {"more": {"peft_config": LORA}, "vllm_sync_adapter": True}
    assert_continuous_is_refused(tmp_path, server, model_path, f"{message}.*{command}", **settings)


def test_weights_go_through_memory_of_this_machine_or_by_nccl(tmp_path, server, model_path, monkeypatch):
    config = server.info["vllm_config"]
    elsewhere = "http://192.0.2.1:8000"  # an address for documentation, which no machine has
    assert shares_memory(config, server.url)
    assert shares_memory(config, server.url.replace("127.0.0.1", "localhost"))
    assert not shares_memory(config, elsewhere)
    assert not shares_memory(config | {"parallel_config": {}}, server.url)
    monkeypatch.setattr(server_checks, "shares_memory", lambda config, url: shares_memory(config, elsewhere))
    assert_continuous_is_refused(tmp_path, server, model_path, "gets weights by NCCL, and this process has no GPU")
    config["weight_transfer_config"] = None
    message = "is on another machine.*Add --weight-transfer-config '.*nccl"
    assert_continuous_is_refused(tmp_path, server, model_path, message)


def test_the_server_needs_the_precision_of_training(tmp_path, model_path):
    """`auto` is that of the checkpoint."""
    dtypes = {"auto": "float32", "bfloat16": "bfloat16", torch.float16: "float16"}
    for dtype, expected in dtypes.items():
        assert training_dtype(config(tmp_path, model_init_kwargs={"dtype": dtype}), model_path) == expected
    assert training_dtype(config(tmp_path), model_path) == "float32"
    assert training_dtype(config(tmp_path, bf16=True), model_path) == "bfloat16"
    assert training_dtype(config(tmp_path), tiny_model().to(torch.float16)) == "float16"


def test_a_server_without_development_mode_is_refused(tmp_path, server, model_path):
    server.answers["/server_info"] = 404
    assert_continuous_is_refused(tmp_path, server, model_path, "has no development endpoints.*VLLM_SERVER_DEV_MODE=1")


def test_a_server_that_hangs_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr(server_checks, "_SECONDS_TO_ANSWER", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(httpx.ReadTimeout):
        server_checks.server_config(f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_a_server_that_hangs_before_a_run_is_refused(tmp_path, server, model_path, monkeypatch):
    def hangs(url):
        raise httpx.ReadTimeout("timed out")

    monkeypatch.setattr(server_checks, "server_config", hangs)
    assert_continuous_is_refused(tmp_path, server, model_path, "has not answered within 180 seconds. Restart it with:")


def test_a_version_of_vllm_that_was_not_tested_is_refused(tmp_path, server, model_path):
    server.vllm_version = "0.30.2"
    assert_continuous_is_refused(
        tmp_path, server, model_path, "has version 0.30.2, and rollout_schedule: continuous is tested with 0.31"
    )


def test_a_continuous_server_with_another_model_is_refused(tmp_path, server, model_path):
    server.models["data"][0] |= {"id": "other", "root": "other"}
    assert_continuous_is_refused(
        tmp_path, server, model_path, "serves 'other', but this run trains.*--worker-extension-cls"
    )


def test_the_command_of_the_message_starts_such_a_server(tmp_path, server, model_path):
    """On CPUs by another module, and with as many tokens in a batch as slots have."""
    settings = SETTINGS | server_settings(server.url) | {"vllm_max_model_length": 64, "max_staleness": 1}
    args = build_trainer(tmp_path, model=model_path, **settings).args
    command = serve_command("model", args=args, dtype="float32")
    assert "python -m vllm.entrypoints.openai.api_server --model model --enforce-eager --max-num-seqs 16" in command
    assert "VLLM_CPU_KVCACHE_SPACE=" in command
    assert "--max-num-batched-tokens 1024" in command
    assert f"--port {server.port}" in command
    args.vllm_server_base_url = None
    command = continuous_server_command(args, "model", "bfloat16", on_cpu=False)
    assert "VLLM_SERVER_DEV_MODE=1 vllm serve model --max-model-len 64 --dtype bfloat16" in command
    args.vllm_max_model_length, args.vllm_server_port = None, 8001
    command = continuous_server_command(args, "model", "float32", on_cpu=True, longest=20)
    assert "--max-num-batched-tokens 320 --max-model-len 20 --port 8001" in command
