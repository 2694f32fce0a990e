"""Checks of `holdall.compress` on a model: does the compressed model still mean what the model meant?

The reference is the model itself, with the rows of the compressed tables copied into its own embeddings. Outputs and
gradients of all other parameters must be equal. Budget, optimizers, state dict and deepcopy are checked after that.
A `ConfigError`, or another error that Holdall raises itself, is a refusal; any other error is a failure.
"""

from __future__ import annotations

import copy
import importlib
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor, nn

import holdall
from holdall.common.errors import HoldallError
from holdall.embedding.compressed_embedding import CompressedEmbedding
from holdall.tables import Table

BUDGET = "1/3"
SETTINGS = ("auto", "hashed")
"""Methods that each model is compressed with, sized by the budget."""
CLOSE = 1e-4
SOURCE = Path(holdall.__file__).parent
COMPRESS = importlib.import_module("holdall.embedding.compress")


@dataclass(frozen=True)
class PeerModel:
    """A model of a library: how to build it, and a differentiable result of a forward pass."""

    library: str
    name: str
    build: Callable[[], nn.Module]
    run: Callable[[Any], Tensor]


@dataclass
class ModelOutcome:
    """Outcome of the checks on one model."""

    library: str
    name: str
    outcome: str = "works"
    """"works", "refused", "fails" or "silently wrong"."""
    sentence: str = ""
    tables: int = 0
    compressed: int = 0
    left: list[str] = field(default_factory=list)
    """Tables that are left alone for another reason than their size, with the reason."""
    warnings: list[str] = field(default_factory=list)
    """Warnings of `compress`."""
    passed: list[str] = field(default_factory=list)


OUTCOMES = ("works", "refused", "fails", "silently wrong")
"""From the best to the worst."""


class _WrongError(Exception):
    """A check whose numbers differ: nothing said so."""


class _KindError(Exception):
    """A gradient of another kind than before, which optimizers of torch refuse."""


def check(model: PeerModel) -> ModelOutcome:
    """The worst outcome over all settings and checks; a library that fails without Holdall raises its own error."""
    plain = _seeded(model, 0)
    _loss(model, plain).backward()
    outcome = ModelOutcome(model.library, model.name, tables=len(list(_embeddings(plain))))
    for method in SETTINGS:
        for step, run in _checks(model, method, outcome):
            found, sentence = _outcome(run)
            if found == "works":
                outcome.passed.append(f"{method}: {step}")
                continue
            if found != "refused":
                sentence = f"{method}, {step}: {sentence}"
            if OUTCOMES.index(found) > OUTCOMES.index(outcome.outcome):
                outcome.outcome, outcome.sentence = found, sentence
            if step == "compress":
                break
    return outcome


def _outcome(run: Callable[[], None]) -> tuple[str, str]:
    """Outcome of one check, and its sentence."""
    try:
        run()
    except _WrongError as error:
        return "silently wrong", str(error)
    except _KindError as error:
        return "fails", str(error)
    except Exception as error:
        if _refusal(error):
            return "refused", _one_line(error)
        return "fails", f"{type(error).__name__}: {_one_line(error)}"
    return "works", ""


def _refusal(error: Exception) -> bool:
    """Whether Holdall itself raised the error, and not torch or the library on its behalf."""
    if isinstance(error, HoldallError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, AttributeError | TypeError | ValueError) and Path(frames[-1].filename).is_relative_to(
        SOURCE
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:700]


def _checks(model: PeerModel, method: str, outcome: ModelOutcome) -> Iterator[tuple[str, Callable[[], None]]]:
    """Names of the checks and the checks, in the order in which they run."""
    made: dict[str, Any] = {}

    def compress() -> None:
        made["plain"], made["model"] = _seeded(model, 0), _seeded(model, 0)
        before = {name: tuple(p.shape) for name, p in made["model"].named_parameters()}
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                made["report"] = holdall.compress(made["model"], BUDGET, method)
        except HoldallError:
            if {name: tuple(p.shape) for name, p in made["model"].named_parameters()} != before:
                raise _WrongError("compress refused and yet changed the model") from None
            raise
        outcome.compressed = len(made["report"].tables)
        outcome.warnings = [str(warning.message) for warning in caught if warning.category is UserWarning]
        outcome.left = [f"{table.name} {table.reason}" for table in made["report"].left_alone if not table.counted]

    yield "compress", compress
    yield "budget", lambda: _check_budget(made["plain"], made["model"], made["report"])
    yield "forward and gradients", lambda: _check_meaning(model, made["plain"], made["model"])
    yield "kind of gradients", lambda: _check_gradients(model, made["plain"], made["model"])
    yield "Adam", lambda: _check_adam(model, method)
    yield "SparseAdam", lambda: _check_sparse_adam(model, method)
    yield "Optimizers", lambda: _check_optimizers(model, method)
    yield "state dict", lambda: _check_state_dict(model, method, made["model"])
    yield "deepcopy", lambda: _check_deepcopy(model, made["model"])


def _seeded(model: PeerModel, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)
    return model.build().eval()


def _output(model: PeerModel, module: nn.Module) -> Tensor:
    torch.manual_seed(7)
    return model.run(module).float()


def _copy(model: PeerModel, module: nn.Module) -> nn.Module:
    """A deepcopy; some models keep a result of their last forward pass, which torch copies without gradients only."""
    with torch.no_grad():
        _output(model, module)
    return copy.deepcopy(module)


def _loss(model: PeerModel, module: nn.Module) -> Tensor:
    output = _output(model, module)
    weights = torch.linspace(0.5, 1.5, output.numel()).view_as(output)
    return (output * weights).sum() / output.numel() ** 0.5


def _embeddings(module: nn.Module) -> Iterator[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            yield name, part


def _tables(module: nn.Module) -> Iterator[tuple[str, nn.Module, Table]]:
    """Compressed tables by every name that they have, with the module that stands in a table's place."""
    for name, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, CompressedEmbedding):
            yield name, part, part.table
        elif isinstance(part, Table) and not name.endswith(".table") and ".table." not in name:
            yield name, part, part


def _bytes_of_tables(module: nn.Module, without: set[str]) -> int:
    """Bytes of all tables, compressed or not, each counted once; without those of some names."""
    named = [*_embeddings(module), *((name, part) for name, part, _ in _tables(module))]
    parts = [part for name, part in named if name not in without]
    tensors = {id(t): t for part in parts for t in [*part.parameters(), *part.buffers()]}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _check_budget(plain: nn.Module, compressed: nn.Module, report: Any) -> None:
    """The budget is one of the tables that can be replaced; the others are the same before and after."""
    left = {name for table in report.left_alone if not table.counted for name in (table.name, *table.other_names)}
    before, after = _bytes_of_tables(plain, left), _bytes_of_tables(compressed, left)
    if after > before / 3 + 1:
        raise _WrongError(f"{after:,} bytes of tables after, {before:,} before, budget {BUDGET}")
    said = report.bytes_before, report.bytes_after
    if said != (before, after):
        raise _WrongError(f"the report says {said[0]:,} -> {said[1]:,} bytes, the model has {before:,} -> {after:,}")


def _check_meaning(model: PeerModel, plain: nn.Module, compressed: nn.Module) -> None:
    with torch.no_grad():
        for name, part, table in _tables(compressed):
            ids = torch.arange(table.num_rows)
            rows = part(ids) if isinstance(part, CompressedEmbedding) else table.rows(ids)
            target: Any = plain.get_submodule(name)
            target.weight.copy_(rows)
    for one in (plain, compressed):
        one.zero_grad()
    wanted, got = _loss(model, plain), _loss(model, compressed)
    if not _close(_output(model, plain), _output(model, compressed)):
        raise _WrongError("the output is not that of the model with the same rows")
    wanted.backward()
    got.backward()
    gradients = dict(compressed.named_parameters())
    for name, parameter in plain.named_parameters():
        other = gradients.get(name)
        if other is None or parameter.shape != other.shape:
            continue
        if (parameter.grad is None) != (other.grad is None) or not _close(parameter.grad, other.grad):
            raise _WrongError(f"the gradient of {name} is not that of the model with the same rows")


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return True
    one, other = (x.detach().to_dense() if x.is_sparse else x.detach() for x in (one, other))
    if one.shape != other.shape or not bool(torch.isfinite(other).all()):
        return False
    return float((one - other).abs().max()) <= CLOSE * max(1.0, float(one.abs().max()))


def _check_gradients(model: PeerModel, plain: nn.Module, compressed: nn.Module) -> None:
    sparse = any(part.sparse for _, part in _embeddings(plain))
    found = [name for name, p in compressed.named_parameters() if p.grad is not None and p.grad.is_sparse]
    if found and not sparse:
        raise _KindError(f"{found[0]} has a sparse gradient, and the model was built with sparse=False")
    for name, _, table in _tables(compressed):
        part: Any = plain.get_submodule(name)
        if not part.weight.requires_grad and any(p.requires_grad for p in table.parameters()):
            raise _WrongError(f"{name} was frozen, and its compressed table is trained")


def _compressed(model: PeerModel, method: str, *, seed: int = 0, sparse: bool = False) -> nn.Module:
    module = _seeded(model, seed)
    if sparse:
        _make_sparse(module)
    with mock.patch.object(COMPRESS, "warning_of_holders", return_value=None):  # a walk over the heap: once is enough
        holdall.compress(module, BUDGET, method)
    return module


def _make_sparse(module: nn.Module) -> None:
    for _, part in _embeddings(module):
        part.sparse = True


def _step(model: PeerModel, module: nn.Module, optimizers: list[Any]) -> None:
    """Train one step; the loss has to be finite after it, and a table has to have changed."""
    before = [p.detach().clone() for _, _, table in _tables(module) for p in table.parameters()]
    trained = any(p.requires_grad for _, _, table in _tables(module) for p in table.parameters())
    _loss(model, module).backward()
    for optimizer in optimizers:
        optimizer.step()
    after = [p for _, _, table in _tables(module) for p in table.parameters()]
    if trained and all(torch.equal(one, other) for one, other in zip(before, after, strict=True)):
        raise _WrongError("no table changed in a step")
    if not bool(torch.isfinite(_loss(model, module))):
        raise _WrongError("the loss is not finite after a step")


def _check_adam(model: PeerModel, method: str) -> None:
    module = _compressed(model, method)
    if any(part.sparse for _, part in _embeddings(_seeded(model, 0))):
        return  # a model of sparse gradients does not work with Adam in torch either
    _step(model, module, [torch.optim.Adam(module.parameters(), lr=0.01)])


def _check_sparse_adam(model: PeerModel, method: str) -> None:
    module = _compressed(model, method, sparse=True)
    _loss(model, module).backward()
    sparse = [p for p in module.parameters() if p.grad is not None and p.grad.is_sparse]
    others = [p for p in module.parameters() if p.grad is not None and not p.grad.is_sparse]
    module.zero_grad()
    optimizers: list[Any] = [torch.optim.Adam(others, lr=0.01)] if others else []
    if sparse:
        optimizers.append(torch.optim.SparseAdam(sparse, lr=0.01))
    elif method == "hashed":
        raise _KindError("a hashed table of a model with sparse=True has no sparse gradient")
    _step(model, module, optimizers)


def _check_optimizers(model: PeerModel, method: str) -> None:
    ours, theirs = _compressed(model, method), _compressed(model, method)
    _step(model, ours, [holdall.Optimizers(ours, holdall.OptimizerConfig(name="sgd", lr=0.01))])
    _step(model, theirs, [torch.optim.SGD(theirs.parameters(), lr=0.01)])
    others = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if not _close(parameter, others[name]):
            raise _WrongError(f"{name} differs from torch's SGD after a step of Optimizers")
    module = _compressed(model, method)
    _step(model, module, [holdall.Optimizers(module, holdall.OptimizerConfig(name="adagrad", lr=0.01))])
    if not _close(_output(model, module), _output(model, _copy(model, module))):
        raise _WrongError("a deepcopy after a step of Optimizers predicts something else")


def _check_state_dict(model: PeerModel, method: str, compressed: nn.Module) -> None:
    other = _compressed(model, method, seed=1)
    other.load_state_dict(compressed.state_dict())
    if not _close(_output(model, compressed), _output(model, other)):
        raise _WrongError("the output differs after load_state_dict(state_dict())")


def _check_deepcopy(model: PeerModel, compressed: nn.Module) -> None:
    before = _output(model, compressed)
    other = _copy(model, compressed)
    if not _close(before, _output(model, other)):
        raise _WrongError("a deepcopy predicts something else")
    other.zero_grad()
    _step(model, other, [torch.optim.SGD(other.parameters(), lr=0.01)])
    if not _close(before, _output(model, compressed)):
        raise _WrongError("training a deepcopy changes the original")
