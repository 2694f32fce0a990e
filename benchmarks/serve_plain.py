"""Server to compare with: FastAPI, a pydantic model of a row, a dict of ids a feature, and torch or onnxruntime.

It is what a good engineer writes in an hour: one `nn.EmbeddingBag` a table, `torch.inference_mode`, and a plain
function as the route, which FastAPI runs in its pool of threads.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, create_model
from torch import Tensor, nn

from holdall.data.dense import transform
from holdall.data.id_map import load_id_maps
from holdall.data.schema import Schema
from holdall.models import DLRM
from holdall.serving.bundle import open_bundle


class PlainDLRM(nn.Module):
    """DLRM with one `nn.EmbeddingBag` a table."""

    def __init__(self, bundle: Path):
        super().__init__()
        opened = open_bundle(bundle)
        model = opened.model(mmap=False)
        assert isinstance(model, DLRM)
        assert model.bottom is not None
        num_vectors, dim = len(opened.schema.features) + 1, model.config.dim
        self.bottom = _layers(model.bottom, opened.schema.num_dense, ends_with_relu=True)
        self.top = _layers(model.top, dim + num_vectors * (num_vectors - 1) // 2, ends_with_relu=False)
        self.tables = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(model.bags.table(feature.table or feature.name).materialize(), mode="sum")
            for feature in opened.schema.features
        )
        rows, columns = torch.tril_indices(num_vectors, num_vectors, -1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Logits [R] of dense [R, n] and ids [F, R]."""
        x = self.bottom(dense)
        vectors = [x] + [table(one.unsqueeze(1)) for table, one in zip(self.tables, ids, strict=True)]
        stacked = torch.stack(vectors, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.rows, self.columns]
        return self.top(torch.cat([x, products], dim=1)).squeeze(1)


def _layers(mlp: nn.Module, width: int, *, ends_with_relu: bool) -> nn.Sequential:
    """The layers of an MLP as PyTorch's own, without inputs that are always 0."""
    found: list[nn.Module] = []
    for own in (module for module in mlp.modules() if isinstance(module, nn.Linear)):
        layer = nn.Linear(width, own.out_features)
        layer.weight.data, layer.bias.data = own.weight.data[:, :width].contiguous(), own.bias.data
        found += [layer, nn.ReLU()]
        width = own.out_features
    return nn.Sequential(*(found if ends_with_relu else found[:-1]))


class Rows:
    """Rows of a request as the inputs of the model."""

    def __init__(self, bundle: Path):
        self.schema = Schema.load(bundle)
        self.unseen = {feature.name: feature.unseen for feature in self.schema.features}
        self.ids = {}
        for name, id_map in load_id_maps(bundle).items():
            self.ids[name] = {value or "": number for number, value in enumerate(id_map.values.to_pylist())}

    def inputs(self, rows: list[Any]) -> tuple[Tensor, Tensor]:
        dense = np.empty((len(rows), self.schema.num_dense), dtype=np.float32)
        for place, column in enumerate(self.schema.dense):
            values = [getattr(row, column.name) for row in rows]
            dense[:, place] = transform(np.array(values, dtype=np.float64), column)
        ids = [
            [self.ids[f.name].get(getattr(row, f.name) or "", self.unseen[f.name]) for row in rows]
            for f in self.schema.features
        ]
        return torch.from_numpy(dense), torch.tensor(ids)


def application(bundle: Path, onnx: Path | None) -> FastAPI:
    """The application; with `onnx`, that file computes in the place of torch."""
    rows = Rows(bundle)
    fields: dict[str, Any] = {column.name: (float | None, ...) for column in rows.schema.dense}
    fields |= {feature.name: (str | None, ...) for feature in rows.schema.features}
    row_type = create_model("Row", **fields)

    class Request(BaseModel):
        rows: list[row_type]  # type: ignore[valid-type]

    class Scores(BaseModel):
        scores: list[float]

    score = _torch_scores(bundle) if onnx is None else _onnx_scores(onnx)
    app = FastAPI()

    @app.get("/v2/health/ready")
    def ready() -> dict[str, bool]:
        return {"ready": True}

    @app.post("/score")
    def score_rows(request: Request) -> Scores:
        return Scores(scores=score(*rows.inputs(request.rows)))

    return app


def _torch_scores(bundle: Path) -> Any:
    model = PlainDLRM(bundle).eval()

    def score(dense: Tensor, ids: Tensor) -> list[float]:
        with torch.inference_mode():
            return torch.sigmoid(model(dense, ids)).tolist()

    return score


def _onnx_scores(folder: Path) -> Any:
    from holdall.serving.export.export import open_export

    scorer = open_export(folder, num_threads=1)
    from holdall.data.batch import Batch, Ids

    def score(dense: Tensor, ids: Tensor) -> list[float]:
        batch = Batch(dense, Ids(ids.int(), None, len(ids)), torch.zeros(len(dense)))
        return scorer.scores(batch).tolist()

    return score


def main() -> None:
    """`python -m benchmarks.serve_plain BUNDLE [ONNX] PORT`."""
    torch.set_num_threads(1)
    bundle, *onnx, port = sys.argv[1:]
    uvicorn.run(application(Path(bundle), Path(onnx[0]) if onnx else None), port=int(port), log_level="error")


if __name__ == "__main__":
    main()
