"""All GPU benchmarks, each as its own command would run: `python -m benchmarks.gpu_all [--commit HASH]`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = ("gpu_tables", "gpu_dlrm", "gpu_trainer", "gpu_tt")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", help="what the cards are to say where there is no git checkout")
    parser.add_argument("--only", nargs="*", default=BENCHMARKS, choices=BENCHMARKS, help="which to run")
    arguments = parser.parse_args()
    surroundings = dict(os.environ)
    if arguments.commit:
        surroundings["HOLDALL_COMMIT"] = arguments.commit
    here = Path(__file__).parent
    chosen = [name for name in arguments.only if (here / f"{name}.py").exists()]
    failed = [
        n for n in chosen if subprocess.run([sys.executable, "-m", f"benchmarks.{n}"], env=surroundings).returncode
    ]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
