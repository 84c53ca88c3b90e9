"""The quickstart on a GPU: pass@1 of PACS and GRPO doubles. On the CPU it is `make quickstart`."""

import pytest

from benchmarks.shared_engine import share_engine
from experiments.quickstart import MINIATURE, doubled_and_apart, run_seed, summary
from pacs_trl.report.tables import pass_at_k_cells


ENGINE = ["--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_max_model_length", "128"]
ENGINE += ["--vllm_gpu_memory_utilization", "0.3"]


def learn(directory, device: str, arguments: list[str]) -> dict:
    if "--use_vllm" in arguments:
        share_engine(device, "float32")
    return run_seed(0, directory, arguments)


@pytest.mark.needs(cuda=True)
@pytest.mark.parametrize(
    "arguments", [[], pytest.param(ENGINE, marks=pytest.mark.needs(package="vllm"))], ids=["transformers", "vllm"]
)
def test_it_learns(alone, device, tmp_path, record_property, arguments):
    run = alone(learn, tmp_path, device, arguments)
    print(summary([run]))
    cells = {r["method"]: pass_at_k_cells([r], ["miniature/addition"], [1])[1] for r in run["results"].values()}
    record_property("rows", [{"method": method, "pass@1, %": cell.value} for method, cell in cells.items()])
    for method, logs in run["logs"].items():
        assert doubled_and_apart(cells[MINIATURE.start], cells[method]), method
        assert all(abs(entry["loss"]) < 100 for entry in logs if "loss" in entry), method
