"""All GPU benchmarks, each as its own command would run: `python -m benchmarks.gpu_all`."""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = ("gpu_tables", "gpu_dlrm")


def main() -> int:
    failed = [n for n in BENCHMARKS if subprocess.run([sys.executable, "-m", f"benchmarks.{n}"]).returncode]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
