"""The example of a colocated engine with a real vLLM, on the CPU."""

from support.examples import MESSAGES, SMALL, check_finished, run_example


def test_the_colocated_example_trains(tmp_path, monkeypatch, checkpoint, colocated):
    settings = SMALL | {"vllm_max_model_length": colocated["vllm_max_model_length"], "max_steps": 2}
    script = run_example(tmp_path, monkeypatch, "vllm_colocate", MESSAGES, model=checkpoint, **settings)
    check_finished(script, steps=2)
