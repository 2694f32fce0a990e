"""All GPU benchmarks, each as its own command would run: `python -m benchmarks.gpu_all [--commit HASH]`."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys

BENCHMARKS = {
    "gpu_tables": "",
    "gpu_dlrm": "",
    "gpu_tt": "",
    "gpu_trainer": "",
    "tiers_gpu": "",
    "bands": "--device cuda",
    "hot_batches": "--speed-only --device cuda --samples 3200000 --batch-size 16384 --hot-bytes 176MB --prefetch 2 "
    "--card hot_batches_gpu",
    "plan": "--device cuda --batch-size 16384 --scale 0.25 --rows 1500000 --card plan_gpu",
}
"""Arguments by benchmark."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", help="what the cards are to say where the files are a copy")
    parser.add_argument("--only", nargs="*", default=list(BENCHMARKS), choices=BENCHMARKS, help="which to run")
    arguments = parser.parse_args()
    surroundings = dict(os.environ)
    if arguments.commit:
        surroundings["HOLDALL_COMMIT"] = arguments.commit
    failed = []
    for name in arguments.only:
        command = [sys.executable, "-m", f"benchmarks.{name}", *shlex.split(BENCHMARKS[name])]
        if subprocess.run(command, env=surroundings).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
