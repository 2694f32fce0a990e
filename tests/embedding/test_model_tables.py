"""What `compress` replaces and what it must leave alone: shared modules, subclasses, hooks, tied weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from holdall.common.errors import ConfigError
from holdall.embedding.bags import EmbeddingBags
from holdall.embedding.compress import compress
from holdall.embedding.compressed_embedding import CompressedEmbedding
from holdall.tables import Dense, Hashed, HotCold, Table


class Scaled(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(input)


class Called(nn.EmbeddingBag):
    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        return -super().__call__(*args)


class Twice:
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)  # type: ignore[misc]


class Mixed(Twice, nn.Embedding):
    pass


class WithMethod(nn.Embedding):
    def nearest(self, vector: torch.Tensor) -> torch.Tensor:
        return (self.weight @ vector).argmax()


class OnlyInit(nn.Embedding):
    """A subclass whose lookups are those of `nn.Embedding`."""

    size: int = 5000

    def __init__(self) -> None:
        super().__init__(self.size, 8)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.1)

    def extra_repr(self) -> str:
        return "only init"


def with_forward_of_its_own() -> nn.Embedding:
    module = nn.Embedding(5000, 8)
    module.forward = lambda input: input  # type: ignore[method-assign]
    return module


def hooked(register: Callable[[nn.Embedding], object]) -> Callable[[], nn.Embedding]:
    def make() -> nn.Embedding:
        module = nn.Embedding(5000, 8)
        register(module)
        return module

    return make


LEFT_ALONE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "forward of a subclass": (lambda: Scaled(5000, 8), r"is a Scaled with behaviour of its own \(forward\)"),
    "call of a subclass": (lambda: Called(5000, 8), r"Called with behaviour of its own \(__call__\)"),
    "forward of a mixin": (lambda: Mixed(5000, 8), "Mixed with behaviour"),
    "another method": (lambda: WithMethod(5000, 8), r"\(nearest\)"),
    "forward of the object": (with_forward_of_its_own, r"\(forward\)"),
    "forward hook": (hooked(lambda m: m.register_forward_hook(lambda *_: None)), "has hooks"),
    "forward pre-hook": (hooked(lambda m: m.register_forward_pre_hook(lambda *_: None)), "has hooks"),
    "backward hook": (hooked(lambda m: m.register_full_backward_hook(lambda *_: None)), "has hooks"),
    "backward pre-hook": (hooked(lambda m: m.register_full_backward_pre_hook(lambda *_: None)), "has hooks"),
    "state dict hook": (hooked(lambda m: m.register_state_dict_post_hook(lambda *_: None)), "has hooks"),
    "hook of the weight": (hooked(lambda m: m.weight.register_hook(lambda g: 2 * g)), "gradient hooks"),
    "hook after accumulation": (
        hooked(lambda m: m.weight.register_post_accumulate_grad_hook(lambda p: None)),
        "gradient hooks",
    ),
    "parametrized weight norm": (lambda: parametrizations.weight_norm(nn.Embedding(5000, 8)), "parametrization"),
    "pruned": (lambda: prune.l1_unstructured(nn.Embedding(5000, 8), "weight", 0.5), "no plain parameter"),
    "other parameters": (hooked(lambda m: m.register_parameter("bias", nn.Parameter(torch.ones(8)))), "beside"),
    "other buffers": (hooked(lambda m: m.register_buffer("mask", torch.ones(8))), "beside its weight"),
    "other modules": (hooked(lambda m: m.add_module("adapter", nn.Linear(8, 8))), "beside its weight"),
    "max_norm": (lambda: nn.Embedding(5000, 8, max_norm=1.0), "max_norm"),
    "scale_grad_by_freq": (lambda: nn.EmbeddingBag(5000, 8, scale_grad_by_freq=True), "scale_grad_by_freq"),
    "complex numbers": (lambda: nn.Embedding(5000, 8, dtype=torch.complex64), "complex64"),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_modules_that_mean_more_than_their_rows_are_left_alone(case: str) -> None:
    make, reason = LEFT_ALONE[case]
    special = make()
    model = nn.ModuleDict({"plain": nn.Embedding(5000, 8), "special": special})
    report = compress(model, budget=0.1)
    assert isinstance(model["plain"], CompressedEmbedding)
    assert model["special"] is special
    (left,) = report.left_alone
    assert (left.name, left.counted) == ("special", False)
    assert report.bytes_before == 5000 * 8 * 4
    assert left.reason in str(report)

    model = nn.ModuleDict({"plain": nn.Embedding(5000, 8), "special": special})
    with pytest.raises(ConfigError, match=f"special .*{reason}.*: leave it out"):
        compress(model, method={"special": Hashed(buckets=10), "plain": Hashed(buckets=10)})
    assert isinstance(model["plain"], nn.Embedding)

    with pytest.raises(ConfigError, match=f"no table of the model can be compressed: special .*{reason}"):
        compress(nn.ModuleDict({"special": special}), budget=0.1)


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_exclude_and_method_leave_out_what_could_not_be_compressed(case: str) -> None:
    special = LEFT_ALONE[case][0]()
    for options in (
        {"budget": 0.1, "exclude": "special"},
        {"budget": 0.1, "exclude": ["special"]},
        {"method": {"plain": Hashed(buckets=10)}},
        {"method": {"plain": Hashed(buckets=10), "special": Dense()}},
    ):
        model = nn.ModuleDict({"plain": nn.Embedding(5000, 8), "special": special})
        report = compress(model, **options)
        assert model["special"] is special
        assert [line.name for line in report.tables] == ["plain"]
        assert [line.name for line in report.left_alone] == ["special"]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_weight_norm_of_old_is_left_alone() -> None:
    model = nn.ModuleDict({"plain": nn.Embedding(5000, 8), "normed": nn.utils.weight_norm(nn.Embedding(5000, 8))})
    (left,) = compress(model, budget=0.1).left_alone
    assert (left.name, left.num_bytes) == ("normed", (5000 * 8 + 5000) * 4)
    assert "weight norm" in left.reason


def test_a_subclass_without_behaviour_of_its_own_is_compressed() -> None:
    model = nn.ModuleDict({"t": OnlyInit()})
    assert [line.name for line in compress(model, budget=0.1).tables] == ["t"]
    assert isinstance(model["t"], CompressedEmbedding)


def test_rows_are_those_of_the_weight() -> None:
    """Code that adds rows often assigns a weight and leaves `num_embeddings` as it was."""
    for fit in (False, True):
        model = nn.ModuleDict({"t": nn.Embedding(5000, 8)})
        model["t"].weight = nn.Parameter(torch.randn(6000, 8))
        (line,) = compress(model, budget=0.1, fit=fit).tables
        assert (line.rows, line.bytes_before) == (6000, 6000 * 8 * 4)
        assert model["t"](torch.tensor([5999])).shape == (1, 8)


class Shared(nn.Module):
    """One module under two names of one owner and in a second owner, which itself has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(5000, 8)
        self.readers = self.users
        self.encoder = nn.ModuleList([nn.Linear(2, 2), self.users])
        self.again = self.encoder
        self.others = nn.Embedding(5000, 8)


NAMES = ("users", "readers", "encoder.1", "again.1")


def test_a_shared_module_stays_one_table() -> None:
    model = Shared()
    report = compress(model, budget=0.1)
    assert isinstance(model.users, CompressedEmbedding)
    assert model.readers is model.encoder[1] is model.again[1] is model.users
    assert model.others is not model.users
    assert [(line.name, line.other_names) for line in report.tables] == [("users", NAMES[1:]), ("others", ())]
    assert report.bytes_before == 2 * 5000 * 8 * 4
    assert report.bytes_after == model.users.num_bytes() + model.others.num_bytes() <= report.bytes_before / 10
    assert all(name in str(report) for name in NAMES)
    assert sum(p.nbytes for module in (model.users, model.others) for p in module.parameters()) == report.bytes_after


def test_any_name_of_a_shared_module_stands_for_it() -> None:
    for name in NAMES:
        model = Shared()
        compress(model, budget=0.5, exclude=name)
        assert isinstance(model.readers, nn.Embedding)
        assert isinstance(model.others, CompressedEmbedding)
        model = Shared()
        compress(model, method={name: Hashed(buckets=10)})
        assert model.users is model.again[1]
        assert model.users.num_bytes() == 10 * 8 * 4
    with pytest.raises(ConfigError, match="one module: give it one method"):
        compress(Shared(), method={"users": Hashed(buckets=10), "readers": Hashed(buckets=11)})


def tied(how: Callable[[nn.ModuleDict], None]) -> nn.ModuleDict:
    model = nn.ModuleDict(
        {"plain": nn.Embedding(5000, 8), "embed": nn.Embedding(900, 8), "out": nn.Linear(8, 900, bias=False)}
    )
    how(model)
    return model


def share_parameter(model: nn.ModuleDict) -> None:
    model["out"].weight = model["embed"].weight


def share_memory(model: nn.ModuleDict) -> None:
    model["out"].weight = nn.Parameter(model["embed"].weight.data)


def share_a_part(model: nn.ModuleDict) -> None:
    model["out"].register_buffer("popular", model["embed"].weight.detach()[10:20])


@pytest.mark.parametrize("how", [share_parameter, share_memory, share_a_part])
def test_tied_weights_are_left_alone(how: Callable[[nn.ModuleDict], None]) -> None:
    model = tied(how)
    embed = model["embed"]
    report = compress(model, budget=0.1)
    assert model["embed"] is embed
    (left,) = report.left_alone
    assert left.reason in ("shares its weight with out.weight", "shares its weight with out.popular")


@pytest.mark.slow
def test_sparse_buffers_and_meta_tables_are_no_tied_weights() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(5000, 8, device="meta"), "b": nn.Embedding(5000, 8, device="meta")})
    model["c"] = nn.Linear(1, 1)
    model["c"].register_buffer("graph", torch.eye(5).to_sparse())
    assert len(compress(model, budget=0.1).tables) == 2
    assert model["a"].table.device.type == "meta"
    meta = nn.ModuleDict({"t": nn.Embedding(5000, 8, device="meta")})
    with pytest.raises(ConfigError, match="t: is on the meta device and has no rows to fit"):
        compress(meta, budget=0.1, fit=True)


def test_our_own_dense_tables_outside_of_bags_are_found() -> None:
    model = nn.ModuleDict({"table": Dense().build(5000, 8, mode="mean"), "hot": HotCold(5, Hashed(9)).build(5000, 8)})
    report = compress(model, budget=0.1)
    assert [line.name for line in report.tables] == ["table"]
    assert isinstance(model["table"], Table)
    assert model["table"].mode == "mean"


def test_tables_of_two_bags_have_names_of_their_own() -> None:
    model = nn.ModuleDict(
        {"left": EmbeddingBags.build({"a": 5000, "b": 4000}, 8), "right": EmbeddingBags.build({"a": 6000}, 8)}
    )
    report = compress(model, budget=0.1, exclude="right")
    assert [line.name for line in report.tables] == ["left.a", "b"]
    assert [line.name for line in report.left_alone] == ["right.a"]
    compress(model, method={"right.a": Hashed(buckets=7)})
    assert model["right"].table("a").num_bytes() == 7 * 8 * 4


def test_bags_with_an_optimizer_are_refused_before_anything_changes() -> None:
    first, second = (EmbeddingBags.build({name: 5000}, 8) for name in "ab")
    second.packs[0].collects = True
    model = nn.ModuleDict({"plain": nn.Embedding(5000, 8), "first": first, "second": second})
    with pytest.raises(ConfigError, match="compress the model first"):
        compress(model, budget=0.1)
    assert isinstance(model["plain"], nn.Embedding)
    assert first.table("a").method == Dense()


def test_a_model_that_is_itself_a_table_or_wrapped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"the model itself is one table \(Embedding\)"):
        compress(nn.Embedding(5000, 8), budget=0.1)

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module):
            super().__init__()
            self.module = module

    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", Wrapper)
    with pytest.raises(ConfigError, match="compress the model first, then wrap it"):
        compress(Wrapper(nn.ModuleDict({"t": nn.Embedding(5000, 8)})), budget=0.1)


def test_unknown_names_in_exclude_are_refused() -> None:
    model = nn.ModuleDict({"users": nn.Embedding(5000, 8), "head": nn.Linear(8, 1)})
    with pytest.raises(ConfigError, match="did you mean 'users'"):
        compress(model, budget=0.1, exclude=["user"])
    with pytest.raises(ConfigError, match="no table has that name or is in it"):
        compress(model, budget=0.1, exclude="head")
    with pytest.raises(ConfigError, match="in exclude and in method"):
        compress(model, method={"users": Hashed(buckets=7)}, exclude="users")
