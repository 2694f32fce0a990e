"""Templates for Slurm and Kubernetes start the commands of docs/clusters.md, with stand-ins for theirs."""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

from holdall.cli import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
STANDS_IN = {
    "scontrol": 'echo "$*" > scontrol-was-asked; printf "node7\\nnode9\\n"',
    # As srun: once on each host, with its number and name, without its own options.
    "srun": "shift; SLURM_NODEID=0 SLURMD_NODENAME=node7 $SAME; SLURM_NODEID=1 SLURMD_NODENAME=node9 $SAME".replace(
        "$SAME", '"$@"'
    ),
    "torchrun": 'printf "%s|" "OMP_NUM_THREADS=$OMP_NUM_THREADS" "$@"; echo',
}


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, str]:
    """Environment with the stand-ins first in PATH."""
    for name, script in STANDS_IN.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}


def started(words: list[str], cwd: Path, environment: dict[str, str]) -> list[list[str]]:
    """Arguments of every torchrun."""
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [line.split("|")[:-1] for line in done.stdout.splitlines()]


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_slurm(tmp_path: Path, commands: dict[str, str]) -> None:
    slurm = {"SLURM_JOB_NODELIST": "node[7,9]", "SLURM_JOB_ID": "123456", "SLURM_JOB_NUM_NODES": "2"}
    commands |= {**slurm, "SLURM_CPUS_PER_TASK": "16", "DATA": "/shared/my data", "RUN": "/shared/run"}
    words = ["bash", str(ROOT / "configs" / "slurm.sbatch"), "--strategy", "data-parallel", "--lr", "0.1"]
    first, second = started(words, tmp_path, commands)
    for place, found in enumerate((first, second)):
        assert found[0] == "OMP_NUM_THREADS=8", "16 cores for 2 processes"
        assert option(found, "--nnodes") == option(found, "--nproc-per-node") == "2"
        assert option(found, "--rdzv-endpoint") == "node7:23456"
        assert option(found, "--rdzv-conf") == f"is_host={1 - place}"
        assert option(found, "--local-addr") == ("node7", "node9")[place]
        after = found[found.index("holdall") :]
        assert after[:3] == ["holdall", "train", "/shared/my data"]
        assert after[3:] == ["--out", "/shared/run", "--resume", "--strategy", "data-parallel", "--lr", "0.1"]
    assert (tmp_path / "scontrol-was-asked").read_text() == "show hostnames node[7,9]\n"
    del commands["DATA"]
    done = subprocess.run(words, cwd=tmp_path, env=commands, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "set DATA to the prepared data set" in done.stderr


def test_kubernetes(tmp_path: Path, commands: dict[str, str]) -> None:
    text = (ROOT / "configs" / "kubernetes.yaml").read_text(encoding="utf-8")
    (script,) = re.findall(r"args:\n +- \|\n((?: {14}.*\n)+)", text)
    commands |= {"HOSTS": "2", "PROCESSES": "2", "POD_IP": "10.1.2.3"}
    for index in ("0", "1"):
        pod = {**commands, "JOB_COMPLETION_INDEX": index}
        (found,) = started(["sh", "-c", textwrap.dedent(script)], tmp_path, pod)
        assert option(found, "--rdzv-endpoint") == "holdall-0.holdall:29500"
        assert option(found, "--rdzv-conf").startswith(f"is_host={1 - int(index)},")
        assert option(found, "--local-addr") == "10.1.2.3"
        assert "--resume" in found
    sizes = {int(n) for n in re.findall(r"(?:completions|parallelism): (\d+)", text)}
    sizes |= {int(n) for n in re.findall(r'name: HOSTS, value: "(\d+)"', text)}
    assert sizes == {2}, "they must be the same number"


def test_the_options_of_the_templates_are_those_of_train(data: Path, tmp_path: Path) -> None:
    """As one process, which `data-parallel` is without torchrun; resuming what is not there yet starts."""
    words = ["train", str(data), "--out", str(tmp_path / "run"), "--resume", "--strategy", "data-parallel"]
    for _ in range(2):
        main([*words, "--batch-size", "16384", "--dim", "4", "--bottom", "8", "--top", "8"])
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
