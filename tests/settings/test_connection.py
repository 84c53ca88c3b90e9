"""Work without a connection to the Hub."""

import os
import socket

import pytest

from pacs_trl.errors import UserError
from pacs_trl.settings.connection import work_offline_without_connection
from pacs_trl.settings.names import unloadable_model


PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@pytest.fixture
def asked(monkeypatch) -> list:
    """The addresses that are asked for a connection, which none accepts."""
    addresses = []

    def refuse(address, timeout):
        addresses.append(address)
        raise OSError("Name or service not known")

    monkeypatch.setattr(socket, "create_connection", refuse)
    for name in (*PROXIES, "HF_ENDPOINT", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return addresses


@pytest.mark.parametrize(
    "settings",
    [
        {"model_name_or_path": "user/model", "dataset_name": "tests/data/aime_2024.jsonl"},
        {"model_name_or_path": "tests", "dataset_name": "gsm8k"},
        {"model": "tests", "benchmarks": ["math_500"]},
        {"model": "tests", "benchmarks": "own=tests/data/aime_2024.jsonl,math_500"},
    ],
)
def test_files_of_the_hub_come_from_the_cache_without_a_connection(asked, settings, capsys):
    work_offline_without_connection("train", settings)
    assert os.environ["HF_HUB_OFFLINE"] == "1" and asked == [("huggingface.co", 443)]
    assert "huggingface.co cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings",
    [
        {"model_name_or_path": "tests", "dataset_name": "tests/data/aime_2024.jsonl"},
        {"model_name_or_path": "tests", "dataset_name": "gsm8k", "dataset_path": "tests/data/aime_2024.jsonl"},
        {"model_name_or_path": "tests", "dataset_name": "reasoning_gym"},
        {"model": "tests", "benchmarks": "own=tests/data/aime_2024.jsonl,my_module:spec,reasoning_gym/chain_sum"},
        {"model": "name/on_server", "engine": "server", "benchmarks": "tests/data/aime_2024.jsonl"},
        {"model_name_or_path": "user/model", "dataset_name": "gsm8k", "push_to_hub": True},
    ],
)
def test_the_hub_is_not_asked_without_need_or_before_a_push(asked, settings):
    work_offline_without_connection("train", settings)
    assert os.environ["HF_HUB_OFFLINE"] == "0" and not asked


def test_runs_work_offline_only_if_the_endpoint_cannot_be_reached(asked, monkeypatch):
    settings = {"model_name_or_path": "user/model", "dataset_name": "gsm8k"}
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    work_offline_without_connection("train", settings)
    assert not asked
    monkeypatch.delenv("https_proxy")
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example")
    work_offline_without_connection("train", settings)
    assert asked == [("mirror.example", 80)] and os.environ["HF_HUB_OFFLINE"] == "1"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: socket.socket())
    work_offline_without_connection("train", settings)
    assert os.environ["HF_HUB_OFFLINE"] == "0"


def test_a_model_that_is_not_in_the_cache_is_named_with_the_nearest_one_that_is(monkeypatch, tmp_path):
    (tmp_path / "models--Qwen--Qwen3-0.6B").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    error = unloadable_model("Qwen3-0.6b", OSError("We couldn't connect.\nCheck your connection."))
    assert isinstance(error, UserError) and "(We couldn't connect). Did you mean `Qwen/Qwen3-0.6B`?" in str(error)
    assert "Did you mean" not in str(unloadable_model("org/other", OSError("no")))
