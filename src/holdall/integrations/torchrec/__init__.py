"""Conversion of TorchRec's collections and jagged tensors to Holdall's and back (`pip install 'holdall[torchrec]'`).

    bags = from_collection(collection)            # EmbeddingBagCollection -> EmbeddingBags, with its rows
    ids = from_jagged(features, bags)             # KeyedJaggedTensor -> Ids
    bags(ids)                                     # [B, F, dim]; F in the order of the collection's output keys
    to_collection(bags), to_jagged(ids, bags)     # the way back
    BagCollection.of(collection)                  # KeyedJaggedTensor -> KeyedTensor, in the place of the collection

Sum and mean pooling, weights, tables that several features share, and a feature that several tables look up (TorchRec
calls its outputs `feature@table`; so do we). A collection on the `meta` device gets its rows here, in any method:
TorchRec then never allocates the tables. Collections that are sharded already are refused.
"""

from holdall.integrations.torchrec.bag_collection import BagCollection
from holdall.integrations.torchrec.jagged import from_jagged, to_jagged
from holdall.integrations.torchrec.tables import from_collection, to_collection

__all__ = ["BagCollection", "from_collection", "from_jagged", "to_collection", "to_jagged"]
