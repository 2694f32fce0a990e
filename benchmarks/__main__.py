"""Run benchmarks: `python -m benchmarks [NAME...]`, all of them when none is named; `--list` prints their names."""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback

from holdall.common.errors import did_you_mean

# name: module. A module runs with its default options as `python -m <module>` and writes its run card.
BENCHMARKS = {
    "first_hour": "benchmarks.first_hour",
    "prepare": "benchmarks.prepare",
    "score": "benchmarks.score",
    "delta": "benchmarks.delta",
    "profile": "benchmarks.profile",
    "loader": "benchmarks.loader",
    "train_cpu": "benchmarks.train_cpu",
    "bands": "benchmarks.bands",
    "tt_cpu": "benchmarks.tt_cpu",
    "frobenius_cpu": "benchmarks.frobenius_cpu",
    "ten_billion": "benchmarks.ten_billion",
    "checkpoint": "benchmarks.checkpoint",
    "criteo_sample": "benchmarks.criteo_sample",
    "methods": "benchmarks.methods",
    "methods_start": "benchmarks.methods_start",
    "compress_fit": "benchmarks.compress_fit",
    "hot_batches": "benchmarks.hot_batches",
    "drift": "benchmarks.drift",
    "tiers_disk": "benchmarks.tiers_disk",
    "pipeline": "benchmarks.pipeline",
    "plan": "benchmarks.plan",
    "neumf": "benchmarks.neumf",
    "models": "benchmarks.models",
    "accuracy": "benchmarks.accuracy",
    "order": "benchmarks.order",
    "bytes": "benchmarks.bytes",
    "links": "benchmarks.links",
    "simulate": "benchmarks.simulate",
    "local": "benchmarks.local",
    "recovery": "benchmarks.recovery",
    "step_calls": "benchmarks.step_calls",
    "attacks": "benchmarks.attacks",
    "checked_files": "benchmarks.checked_files",
    "inference_cpu": "benchmarks.inference_cpu",
    "serve": "benchmarks.serve",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which to run (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(BENCHMARKS))
        return 0
    for name in arguments.names:
        if name not in BENCHMARKS:
            parser.error(f"no benchmark named '{name}'{did_you_mean(name, BENCHMARKS)}")
    failed = [name for name in arguments.names or BENCHMARKS if not run(name)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(name: str) -> bool:
    """Run one benchmark in this process as its own command would; a failure is shown and does not stop the others."""
    sys.argv = [name]
    try:
        runpy.run_module(BENCHMARKS[name], run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        return stop.code in (None, 0)
    except Exception:
        traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
