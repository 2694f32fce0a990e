"""Tiny transformers with random weights: plain, scaled, offset, tied and factorised embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.peers.model_checks import PeerModel

VOCABULARY = 2000
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
DECODER = {**SMALL, "num_key_value_heads": 1, "head_dim": 16}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("Bert", SMALL),
    "RoBERTa": ("Roberta", {**SMALL, "pad_token_id": 1}),
    "ELECTRA": ("Electra", {**SMALL, "embedding_size": 16}),
    "ALBERT": ("Albert", {**SMALL, "embedding_size": 16}),
    "DistilBERT": ("DistilBert", {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 32,
                                  "max_position_embeddings": 128}),
    "MPNet": ("MPNet", {**SMALL, "pad_token_id": 1}),
    "GPT-2": ("GPT2", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 128}),
    "OPT": ("OPT", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                    "ffn_dim": 32, "max_position_embeddings": 1500, "word_embed_proj_dim": 32}),
    "Gemma": ("Gemma", DECODER),
    "Gemma 2": ("Gemma2", DECODER),
    "Gemma 3": ("Gemma3Text", DECODER),
    "Llama": ("Llama", {**SMALL, "num_key_value_heads": 1}),
    "Mistral": ("Mistral", {**SMALL, "num_key_value_heads": 1}),
    "Qwen 2": ("Qwen2", {**SMALL, "num_key_value_heads": 1}),
    "T5": ("T5", {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}),
    "BART": ("Bart", {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
                      "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
                      "decoder_ffn_dim": 32, "max_position_embeddings": 128, "scale_embedding": True}),
}  # fmt: skip
HEADS = {
    "BERT": "BertForMaskedLM", "GPT-2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "OPT": "OPTForCausalLM",
}  # fmt: skip
"""Models whose output layer is tied to the embedding, except Llama's."""


def hugging_face() -> Iterator[PeerModel]:
    import transformers

    def build(name: str, architecture: str | None = None) -> nn.Module:
        kind, options = CONFIGS[name]
        config = getattr(transformers, f"{kind}Config")(**options)
        if architecture is None:
            return transformers.AutoModel.from_config(config)
        return getattr(transformers, architecture)(config)

    for name in CONFIGS:
        yield PeerModel("transformers", name, lambda name=name: build(name), _run)
    for name, architecture in HEADS.items():
        yield PeerModel("transformers", architecture, lambda n=name, a=architecture: build(n, a), _run)


def _run(module: Any) -> Tensor:
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    more = {"decoder_input_ids": ids} if module.config.is_encoder_decoder else {}
    found = module(input_ids=ids, attention_mask=torch.ones_like(ids), **more)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state
