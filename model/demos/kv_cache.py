"""What one layer remembers of a text: multi-head, grouped, multi-query and latent attention, as allocated."""

from typing import TYPE_CHECKING, Any

import torch

from model.cache import KVCache
from model.config import PRESETS, ModelConfig
from model.demos.demo import Demo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS = 4096


def demo() -> Demo:
    """Bytes of a real KVCache of one layer and 4,096 tokens in bf16, for wide heads and for narrow ones."""
    wide = {
        f"{kind}, {heads} kv head{'s' * (heads > 1)}": _bytes(n_heads=32, n_kv_heads=heads, head_dim=128)
        for kind, heads in (("MHA", 32), ("GQA", 8), ("GQA", 4), ("MQA", 1))
    }
    narrow = {
        f"{kind}, {heads} kv heads": _bytes(n_heads=8, n_kv_heads=heads, head_dim=64)
        for kind, heads in (("MHA", 8), ("GQA", 4), ("GQA", 2))
    }
    narrow |= {
        f"MLA, latent 64, rotary {rotary}": _bytes(
            n_heads=8, n_kv_heads=8, head_dim=64, attention="mla", mla_latent=64, mla_rope_dim=rotary
        )
        for rotary in (32, 16)
    }
    lines = [f"one layer, {TOKENS:,} tokens, bf16"]
    for title, found in (("32 query heads of 128", wide), ("8 query heads of 64", narrow)):
        most = max(found.values())
        lines.append(title)
        lines += [f"  {name:<26}{size / 2**20:8.3f} MiB   {most / size:5.1f} × less" for name, size in found.items()]
    preset = PRESETS["0.5b"]
    grouped, full = (_bytes_of(preset, heads) for heads in (preset.n_kv_heads, preset.n_heads))
    lines.append(f"0.5b, 18 layers, 2,048 tokens: {grouped / 1e6:.1f} MB; with multi-head {full / 1e6:.1f} MB")
    numbers: dict[str, Any] = {"wide": wide, "narrow": narrow, "0.5b": grouped, "0.5b multi-head": full}
    return Demo("KV cache: what a layer remembers of 4,096 tokens", tuple(lines), numbers, _draw(wide, narrow))


def _bytes(**sizes: Any) -> int:
    shape = {"n_layers": 1, "d_model": sizes["n_heads"] * sizes["head_dim"], "seq_len": TOKENS}
    config = ModelConfig(**{**PRESETS["mini"].to_dict(), **shape, **sizes})
    return KVCache(config, batch_size=1, max_tokens=TOKENS, dtype=torch.bfloat16).nbytes


def _bytes_of(preset: ModelConfig, kv_heads: int) -> int:
    config = ModelConfig(**{**preset.to_dict(), "n_kv_heads": kv_heads})
    return KVCache(config, batch_size=1, max_tokens=config.seq_len, dtype=torch.bfloat16).nbytes


def _draw(wide: dict[str, int], narrow: dict[str, int]) -> Any:
    def draw(figure: "Figure") -> None:
        for axes, title, found in zip(
            figure.subplots(1, 2), ("32 query heads of 128", "8 query heads of 64"), (wide, narrow), strict=True
        ):
            bars = axes.barh(list(found)[::-1], [size / 2**20 for size in list(found.values())[::-1]])
            axes.bar_label(bars, fmt="{:g}", padding=4)
            axes.margins(x=0.15)
            axes.set(title=title, xlabel="MiB")

    return draw
