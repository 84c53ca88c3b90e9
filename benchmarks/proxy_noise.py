"""How far proxies are from 0 when nothing has moved, because log-probabilities were computed with other neighbors.

    python benchmarks/proxy_noise.py            # two CPU cores, about two minutes
    python benchmarks/proxy_noise.py --device cuda

`pacs-trl gpu-check` has the same comparison, see `pacs_trl/gpu_check/drift.py`.
"""

import argparse
import platform
from pathlib import Path

import torch

from pacs_trl.gpu_check.drift import drift
from pacs_trl.report.tables import to_markdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    where = f"{torch.get_num_threads()} CPU threads, {platform.machine()}"
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else where}\n")
    rows = drift(device=device, directory=Path(), model="small", completion_max=512).rows
    print(to_markdown([*rows[0]], [[f"{v:.2g}" if isinstance(v, float) else v for v in row.values()] for row in rows]))


if __name__ == "__main__":
    main()
