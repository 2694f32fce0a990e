"""PyTorch's and TorchRec's own tests on Holdall's tables, and `compress` on other people's models.

    make peers PYTORCH_TESTS=pytorch/test TORCHREC_TESTS=torchrec/torchrec
    python -m benchmarks.compatibility --pytorch-tests pytorch/test --torchrec-tests torchrec/torchrec

`--pytorch-tests` is the folder `test` of PyTorch's repository at the installed version, `--torchrec-tests` the folder
`torchrec` of TorchRec's. Their files are read where they are. What is not given or not installed is left out, and then
no card is written. The adaptors are in tests/peers; tools/compatibility.py makes docs/compatibility.md from the card.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.card import print_table, write_card
from tests.peers import libraries, pytorch_suite, replay
from tests.peers.expected import verdict
from tests.peers.suites import Case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("pytorch", "torchrec"):
        given = os.environ.get(f"HOLDALL_{name.upper()}_TESTS")
        parser.add_argument(f"--{name}-tests", type=Path, default=Path(given) if given else None)
    parser.add_argument("--libraries", nargs="*", default=list(libraries.LIBRARIES), metavar="NAME")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"versions": {"torch": torch.__version__}, "left_out": {}}
    if arguments.pytorch_tests is None:
        results["left_out"]["PyTorch's tests"] = "the folder was not given"
    else:
        results |= pytorch(arguments.pytorch_tests)
    results["models"] = models(arguments.libraries, results)  # before TorchRec, whose optimizers PyKEEN trips over
    if arguments.torchrec_tests is None or libraries.version("torchrec") is None:
        results["left_out"]["TorchRec's tests"] = "TorchRec is not installed, or the folder was not given"
    else:
        results["versions"]["torchrec"] = libraries.version("torchrec")
        results["torchrec"] = torchrec(arguments.torchrec_tests)
    show(results)
    if results["left_out"]:
        print(f"no card is written, since parts were left out: {results['left_out']}")
    else:
        print(f"wrote {write_card('compatibility', results, NOTES)}")
    wrong = [m["model"] for m in results["models"] if m["outcome"] == "silently wrong"]
    if wrong:
        sys.exit(f"silently wrong: {', '.join(wrong)}")


NOTES = (
    "Error classes and messages are not compared: a refusal of Holdall counts where a test wants an error of torch. "
    "Options that only torch has (max_norm, scale_grad_by_freq) are left to torch's own modules."
)


def pytorch(folder: Path) -> dict[str, Any]:
    """PyTorch's tests on dense tables, and their lookups on every method."""
    cases, record = pytorch_suite.run(folder)
    compared = replay.compare(record.lookups)
    return {
        "pytorch": {
            **counts(cases),
            "on_tables": sum(case.outcome == "passed" and case.lookups > 0 for case in cases),
            "lookups": len(record.lookups),
        },
        "methods": [
            {
                "method": method,
                "equal": one.equal,
                "refused": dict(one.refused),
                "not_comparable": one.not_comparable,
                "different": one.different,
            }
            for method, one in compared.items()
        ],
    }


def torchrec(folder: Path) -> dict[str, Any]:
    """TorchRec's tests on `BagCollection`, by file."""
    from tests.peers import torchrec_suite

    return {name: counts(cases) for name, cases in torchrec_suite.run(folder).items()}


def counts(cases: list[Case]) -> dict[str, Any]:
    """Numbers of tests by outcome, and those that did not pass."""
    verdicts = [(case.name, *verdict(case)) for case in cases]
    by_outcome = Counter(outcome for _, outcome, _ in verdicts)
    return {
        "passed": by_outcome["works"],
        "of": len(cases) - by_outcome["skipped"],
        "skipped": by_outcome["skipped"],
        "not_passed": [
            {"test": name, "outcome": outcome, "sentence": sentence}
            for name, outcome, sentence in verdicts
            if outcome not in ("works", "skipped")
        ],
    }


def models(names: list[str], results: dict[str, Any]) -> list[dict[str, Any]]:
    """Outcomes of `compress` on the models of the libraries that are installed."""
    found = []
    for name in names:
        version = libraries.version(name)
        if version is None:
            results["left_out"][name] = "not installed"
            continue
        results["versions"][name] = version
        for outcome in libraries.check_models(name):
            row = asdict(outcome)
            found.append({"library": row.pop("library"), "model": row.pop("name"), **row})
    return found


def show(results: dict[str, Any]) -> None:
    suites = {"PyTorch": results.get("pytorch"), **results.get("torchrec", {})}
    rows = [{"suite": name, "passed": one["passed"], "of": one["of"]} for name, one in suites.items() if one]
    print_table("Tests", rows)
    print_table(
        "Models",
        [
            {"library": m["library"], "model": m["model"], "outcome": m["outcome"], "": m["sentence"]}
            for m in results["models"]
        ],
    )


if __name__ == "__main__":
    main()
