"""A session of tests leaves nothing in the system's temporary directory (see conftest.py)."""

import os
import subprocess
import sys
from pathlib import Path


SESSION = """
import subprocess
import sys
import tempfile

tempfile.mkdtemp(suffix="wandb-media")  # what wandb does when it is imported


def test_of_libraries_and_of_processes():
    command = "import tempfile; tempfile.mkdtemp(prefix='torchelastic_')"
    subprocess.run([sys.executable, "-c", command], check=True)


def test_of_our_own():
    tempfile.mkdtemp(prefix="forgotten-")
"""


def test_a_session_leaves_nothing(tmp_path):
    (tmp_path / "test_session.py").write_text(SESSION)
    system = tmp_path / "system"
    system.mkdir()
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if name != "TRACKIO_DIR"}
    environment |= {"TMPDIR": str(system), "PYTHONPATH": path}
    # in a process of xdist, which ends without cleaning up
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "conftest", "test_session.py"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert not [name for name in os.listdir(system) if not name.startswith("pytest-of-")]
    # what we forget ourselves is an error of the test that forgot it
    assert "2 passed, 1 error" in result.stdout, result.stdout + result.stderr
    assert "left in the temporary directory: ['forgotten-" in result.stdout
