"""One layer of the decoder: attention and feed-forward on the residual stream. `build_block` makes the chosen kind.

The usual one is `Block`. The others differ in where norms stand and what the residual is.
Suffixes: b batch, t tokens, d model width, n residual streams.
"""

from torch import Tensor, nn

from model.attention import build_attention
from model.cache import KVCache
from model.config import ModelConfig
from model.feedforward import build_feedforward
from model.masks import Mask
from model.norms import build_norm
from model.positions import Rotation
from model.residual import HyperConnection, gather, spread


class Block(nn.Module):
    """Attention, then feed-forward, each reading a normed copy of the residual stream and adding to it (Pre-Norm).

    The stream itself meets no norm, so gradients reach the first block undamped.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = build_norm(config)
        self.self_attn = build_attention(config, layer)
        self.post_attention_layernorm = build_norm(config)
        self.mlp = build_feedforward(config)

    def forward(
        self,
        x_btd: Tensor,
        rotation: Rotation,
        cache: KVCache | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        x_btd = x_btd + self.self_attn(self.input_layernorm(x_btd), rotation, cache, mask)
        out_btd: Tensor = x_btd + self.mlp(self.post_attention_layernorm(x_btd))
        return out_btd


class PostNormBlock(nn.Module):
    """x ← Norm(α x + f(x)) for attention, then for feed-forward: the norms stand on the residual stream.

    "post" has α = 1 (Vaswani et al. 2017, section 3.1). "deepnorm" has α = (2 · n_layers)^¼, which keeps more of the
    stream (Wang et al. 2022, arXiv 2203.00555, section 2); with initial matrices made smaller to match, see
    `model.initial`. The last block ends with a norm, so none is needed before the head.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.alpha = (2 * config.n_layers) ** 0.25 if config.norm_place == "deepnorm" else 1.0
        self.self_attn = build_attention(config, layer)
        self.post_attention_layernorm = build_norm(config)
        self.mlp = build_feedforward(config)
        self.post_feedforward_layernorm = build_norm(config)

    def forward(
        self,
        x_btd: Tensor,
        rotation: Rotation,
        cache: KVCache | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        attended_btd = self.self_attn(x_btd, rotation, cache, mask)
        x_btd = self.post_attention_layernorm(attended_btd.add(x_btd, alpha=self.alpha))
        out_btd: Tensor = self.post_feedforward_layernorm(self.mlp(x_btd).add(x_btd, alpha=self.alpha))
        return out_btd


class HyperBlock(Block):
    """The usual block over several residual streams: `model.residual`.

    The first block takes one stream and the last gives one back; between blocks it is (n, b, t, d).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.n_streams, self.is_first, self.is_last = config.n_streams, layer == 0, layer == config.n_layers - 1
        self.attention_streams = HyperConnection(config.n_streams, 2 * layer)
        self.mlp_streams = HyperConnection(config.n_streams, 2 * layer + 1)

    def forward(
        self,
        x_btd: Tensor,
        rotation: Rotation,
        cache: KVCache | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        def attention(read_btd: Tensor) -> Tensor:
            attended_btd: Tensor = self.self_attn(self.input_layernorm(read_btd), rotation, cache, mask)
            return attended_btd

        def feedforward(read_btd: Tensor) -> Tensor:
            out_btd: Tensor = self.mlp(self.post_attention_layernorm(read_btd))
            return out_btd

        x_nbtd = spread(x_btd, self.n_streams) if self.is_first else x_btd
        x_nbtd = self.attention_streams(x_nbtd, attention)
        x_nbtd = self.mlp_streams(x_nbtd, feedforward)
        return gather(x_nbtd) if self.is_last else x_nbtd


def build_block(config: ModelConfig, layer: int) -> nn.Module:
    """The choice that the config names; all are called alike, (x, rotation, cache, mask)."""
    if config.residual == "hyper":
        return HyperBlock(config, layer)
    return Block(config, layer) if config.norm_place == "pre" else PostNormBlock(config, layer)
