"""A checkpoint as one GGUF file, which llama.cpp and what is built on it run.

llama.cpp's "llama" architecture pairs neighbouring dimensions in RoPE, so q_proj and k_proj are reordered
(`model.positions.reorder`). Its tokenizer "llama" is SentencePiece's BPE with byte fallback: it merges by the pieces'
scores, which are handed over with their types. Ids that only pad the model's vocabulary are left out. A text begins as
documents do in training: EOS stands where others have a BOS, and is put before every prompt.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from data_pipeline.durable import publish, temporary_name
from model.config import COMPONENTS, ModelConfig
from model.positions import reorder
from pretrain.export import Report, load_for_export, report
from pretrain.run_directory import CheckpointError
from tokenizer.codec import MODEL_FILE, Codec
from tokenizer.export import why_not
from tokenizer.folder import refuse_unwritable
from tokenizer.model_file import ModelFile

LAYOUT = "interleaved"
MAGIC = b"GGUF"

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}
_FILE_TYPES = {
    torch.float32: gguf.LlamaFileType.ALL_F32,
    torch.float16: gguf.LlamaFileType.MOSTLY_F16,
    torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16,
}


def export_gguf(checkpoint: Path, out: Path, *, dtype: str | None, overwrite: bool = False) -> Report:
    """Write a checkpoint (or a run's newest) as the file `out`, whole or not at all.

    Raises CheckpointError or TokenizerError: a checkpoint that is damaged or of other components than Llama's, a
    tokenizer that llama.cpp would read otherwise, an `out` that is occupied.
    """
    refuse_unwritable(out)
    _refuse_occupied(out, overwrite=overwrite)
    config, weights, codec = load_for_export(checkpoint, dtype)
    _refuse_other_components(checkpoint, config)
    model = ModelFile.parse((codec.folder / MODEL_FILE).read_bytes())
    if reason := why_not(model):
        raise CheckpointError(f"{codec.folder}: llama.cpp would give other ids: {reason}")
    for name in {"embed_tokens.weight", "lm_head.weight"} & weights.keys():
        weights[name] = weights[name][: codec.vocab_size]
    temporary = temporary_name(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(temporary, config, weights, codec, model)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        publish(temporary, out)
    except OSError as error:  # numpy writes the tensors, and says of a full disk how many values went on it
        reason = error.strerror or f"{error}; is the disk full?"
        raise CheckpointError(f"{out}: can't be written ({reason}); choose another --out") from error
    finally:
        temporary.unlink(missing_ok=True)
    return report(out, [out], weights, codec.vocab_size, codec)


def _refuse_other_components(checkpoint: Path, config: ModelConfig) -> None:
    if others := [f"{name} = {value!r}" for name, value in config.to_dict().items() if name in COMPONENTS]:
        raise CheckpointError(
            f"{checkpoint} has {', '.join(others)}: a GGUF of ours is a plain Llama; see whether --format hf has it"
        )


def _refuse_occupied(out: Path, *, overwrite: bool) -> None:
    if not out.exists():
        return
    if not out.is_file():
        raise CheckpointError(f"{out} is no file: --format gguf writes one, call it NAME.gguf")
    with out.open("rb") as file:
        ours = file.read(len(MAGIC)) == MAGIC
    if not ours:
        raise CheckpointError(f"{out} is there and is no GGUF file; choose another --out")
    if not overwrite:
        raise CheckpointError(f"{out} is there already; choose another --out or pass --overwrite")


def _write(path: Path, config: ModelConfig, weights: Mapping[str, Tensor], codec: Codec, model: ModelFile) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(_FILE_TYPES[weights["embed_tokens.weight"].dtype])
    writer.add_context_length(config.seq_len)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_vocab_size(codec.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece.encode() for piece in model.pieces])
    writer.add_token_scores(model.scores.tolist())
    writer.add_token_types(model.types.tolist())
    writer.add_unk_token_id(codec.unk_id)
    writer.add_bos_token_id(codec.eos_id)
    writer.add_eos_token_id(codec.eos_id)
    writer.add_pad_token_id(codec.pad_id)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    for name, values, kind in _tensors(config, weights):
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(
    config: ModelConfig, weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]]:
    """llama.cpp's name of each tensor, its values, and their type where numpy has none: bf16 comes as bytes.

    Norms are fp32, as llama.cpp wants them.
    """
    for name, weight in reorder(weights, config.head_dim, have=config.rope_layout, want=LAYOUT).items():
        inner = name.removesuffix(".weight")
        prefix = ""
        if inner.startswith("layers."):
            _, layer, inner = inner.split(".", 2)
            prefix = f"blk.{layer}."
        theirs = f"{prefix}{_NAMES[inner]}.weight"
        if weight.dim() == 1:
            yield theirs, weight.float().numpy(), None
        elif weight.dtype == torch.bfloat16:
            yield theirs, weight.contiguous().view(torch.uint8).numpy(), gguf.GGMLQuantizationType.BF16
        else:
            yield theirs, weight.contiguous().numpy(), None
