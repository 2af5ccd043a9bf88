"""The decoder, top to bottom: ids -> embedding -> blocks -> last norm -> head.

It is Llama's where nothing else is chosen. A choice is a module of its own, made once, by a `build_…` function.
Suffixes of tensor names: b batch, t tokens, d model width, v vocabulary.
Parameter names are Hugging Face's, without the leading "model.".
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from model import attention_cpu
from model.blocks import build_block
from model.cache import KVCache
from model.config import ModelConfig, checkpointing_period
from model.initial import draw
from model.loss import Head, LossSum
from model.masks import Mask, additive, document_mask, window_mask
from model.norms import build_norm
from model.positions import Places, build_positions, one_text, within_documents

# What "selective" checkpointing keeps: matrix products and attention, by the names autograd knows them under.
_aten = torch.ops.aten
COSTLY_OPERATIONS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]


class Transformer(nn.Module):
    """The whole model. Tied means that embedding and head are one Parameter, not two that are kept equal.

    activation_checkpointing: "full" keeps only each block's input and runs the block again in backward, a third more
    compute; "every-N" does so with each N-th block; "selective" keeps of each block what is costly to compute again,
    the outputs of matrices and attention, and recomputes norms, RoPE, SiLU and sums. The gradients are the same, bit
    for bit in fp32.
    loss_chunk_tokens: how many tokens' logits exist at a time while the loss is computed.
    z_loss: the coefficient of the z-loss, see `next_token_loss`.
    """

    activation_checkpointing: str = "none"
    loss_chunk_tokens: int = 1024
    z_loss: float = 0.0

    def __init__(self, config: ModelConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = build_positions(config)
        self.layers = nn.ModuleList(build_block(config, layer) for layer in range(config.n_layers))
        self.norm = build_norm(config) if config.norm_place == "pre" else nn.Identity()  # else the last block's
        self.lm_head = Head(config.d_model, config.vocab_size)
        self._tie()
        self.init_weights(generator)

    def forward(
        self,
        ids_bt: Tensor,
        targets_bt: Tensor | None = None,
        cache: KVCache | None = None,
        documents_bt: Tensor | None = None,
    ) -> Tensor | LossSum:
        """Logits (b, t, vocab_size) of the next token; or, given targets, the summed loss and the token count.

        targets_bt[b, t] is the id that follows ids_bt[b, t] (the shift is the caller's); -100 is ignored.
        With a cache, ids_bt are the tokens after those that each row of it holds, and are added to it.
        With documents_bt, equal numbers for the tokens of one document, which stand side by side, each document is
        read as if it were alone: positions begin at 0 with it, attention stays within it.
        ValueError when positions run past seq_len, and for documents together with a cache.
        """
        hidden_btd = self.hidden(ids_bt, cache, documents_bt)
        if targets_bt is None:
            logits_btv: Tensor = self.lm_head(hidden_btd)
            return logits_btv
        loss: LossSum = self.lm_head(hidden_btd, targets_bt, self.loss_chunk_tokens, self.z_loss)
        return loss

    def hidden(self, ids_bt: Tensor, cache: KVCache | None = None, documents_bt: Tensor | None = None) -> Tensor:
        """What the head reads: the residual stream after the last norm, (b, t, d_model)."""
        tokens = ids_bt.shape[1]
        places, mask = self._sight(ids_bt, cache, documents_bt)
        x_btd, rotation = self.positions(self.embed_tokens(ids_bt), places)
        period = checkpointing_period(self.activation_checkpointing) if torch.is_grad_enabled() else 0
        for layer, block in enumerate(self.layers):
            if period and layer % period == 0:
                x_btd = self._checkpointed(block, x_btd, rotation, cache, mask)
            else:
                x_btd = block(x_btd, rotation, cache, mask)
        if cache is not None:
            cache.advance(tokens)
        normed_btd: Tensor = self.norm(x_btd)
        return normed_btd

    def compile_blocks(self) -> None:
        """Have torch.compile compile the blocks when they first run: once, since all have the same code."""
        attention_cpu.keep_whole()
        for block in self.layers:
            block.compile(dynamic=False)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Meanwhile compiled blocks run as they are written: hooks on what is in them are called."""
        compiled = [block._compiled_call_impl for block in self.layers]
        for block in self.layers:
            block._compiled_call_impl = None
        try:
            yield
        finally:
            for block, call in zip(self.layers, compiled, strict=True):
                block._compiled_call_impl = call

    def _checkpointed(self, block: nn.Module, *inputs: object) -> Tensor:
        """The block's output; what backward needs of the block, apart from its inputs, is computed again then."""
        keep: Callable[[], Any] = noop_context_fn
        if self.activation_checkpointing == "selective":
            keep = functools.partial(create_selective_checkpoint_contexts, COSTLY_OPERATIONS)
        out_btd: Tensor = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=keep)
        return out_btd

    def _sight(self, ids_bt: Tensor, cache: KVCache | None, documents_bt: Tensor | None) -> tuple[Places, Mask | None]:
        """Where the tokens of a pass stand, and which others each may look at: the same for all layers."""
        tokens, window, dtype = ids_bt.shape[1], self.config.sliding_window, self.embed_tokens.weight.dtype
        if cache is not None:
            if documents_bt is not None:
                raise ValueError("a cache holds one document a row: leave out documents_bt")
            return cache.places(tokens), cache.mask(tokens)
        if documents_bt is not None:
            return within_documents(documents_bt), additive(document_mask(documents_bt, window), dtype)
        return one_text(tokens), additive(window_mask(tokens, window, ids_bt.device), dtype)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Draw every weight: see `model.initial`."""
        draw(self, self.config, generator)

    def _tie(self) -> None:
        if self.config.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Transformer":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()  # to_empty() after the meta device gives each module a Parameter of its own
        return self
