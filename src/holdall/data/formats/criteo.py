"""Layout of the Criteo click log: a label, 13 integers and 26 categorical values per line, separated by tabs.

Criteo Kaggle and Criteo Terabyte share it. Missing values are empty. Values are not changed: the hexadecimal strings
are names, not numbers, and a quote is a character like any other. `data.read_text` parses the lines; `data.passes`
assigns the ids.
"""

from __future__ import annotations

from holdall.data.layout import Layout, RawDense, RawFeature, TextFormat

LABEL = "label"
DENSE = tuple(f"I{number}" for number in range(1, 14))
CATEGORICAL = tuple(f"C{number}" for number in range(1, 27))

CRITEO = Layout(
    label=LABEL,
    dense=tuple(RawDense(name=name, column=name) for name in DENSE),
    features=tuple(RawFeature(name=name, column=name) for name in CATEGORICAL),
    text=TextFormat(separator="\t", columns=(LABEL, *DENSE, *CATEGORICAL)),
)
