"""The registry of vLLM has the architectures of the table in docs/compatibility.md."""

import families
import pytest


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family["model_type"])
def test_vllm_has_the_family(family):
    from vllm import ModelRegistry

    architecture = type(families.model_of(family)).__name__
    assert architecture in ModelRegistry.get_supported_archs()
    backend = ModelRegistry.models[architecture].module_name
    assert ("transformers" in backend) == (family["vllm"] == "transformers")
