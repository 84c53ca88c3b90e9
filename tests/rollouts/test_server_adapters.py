"""Files of LoRA adapters for a vLLM server."""

from pacs_trl.rollouts.server_adapters import ServerAdapters


def test_files_of_a_run_that_was_killed_are_removed(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "vllm_adapters_killed" / "pacs_trl-0-v1").mkdir(parents=True)
    adapters = ServerAdapters(None, str(tmp_path))
    folders = {path.name for path in tmp_path.iterdir()}
    assert folders == {"checkpoint-1", adapters.folder_of(0).parent.name}
