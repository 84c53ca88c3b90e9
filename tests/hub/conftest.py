"""A Hub on this machine, in the place of the real one."""

import huggingface_hub.constants
import pytest
import transformers.utils.hub
from support.hub_server import LoopbackHub


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # made once, with the address of its day
    huggingface_hub.close_session()
    with LoopbackHub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        yield hub
    huggingface_hub.close_session()
