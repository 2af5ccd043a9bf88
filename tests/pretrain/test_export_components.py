"""Models other than Llama on the road from transformers to a checkpoint, to text, and back to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.utils import logging

from model.architectures import ARCHITECTURES, to_config
from model.config import ModelConfig
from model.generate import Sampling, generate
from pretrain.checkpoint import load_model
from pretrain.export import export_hf, import_hf
from pretrain.export_gguf import export_gguf
from pretrain.run_directory import CheckpointError
from tests.conftest import VOCAB_SIZE

logging.disable_progress_bar()

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "n_layers": 2,
    "n_heads": 1,
    "n_kv_heads": 1,
    "head_dim": 64,
    "d_ff": 96,
    "seq_len": 64,
    "norm_eps": 1e-5,
    "tied": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": True, "rope_scaling": "yarn", "rope_scaling_factor": 2.0, "rope_original_seq_len": 32},
    "mistral": {"sliding_window": 8},
    "gpt2": {"norm": "layer", "bias": True, "ffn": "gelu", "positions": "learned"},
}


def theirs(folder: Path, kind: str) -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    table = to_config(ModelConfig(**SIZES, **KINDS[kind], init_std=0.2), torch.float32)
    model = getattr(transformers, ARCHITECTURES[kind][0])(transformers.AutoConfig.for_model(**table)).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_in_text_and_out_again(kind: str, tokenizer: Path, tmp_path: Path) -> None:
    """The checkpoint says what it is; greedy text is theirs; the export is their own weights, bit for bit."""
    model = theirs(tmp_path / "theirs", kind)
    _, config = import_hf(tmp_path / "theirs", tmp_path / "imported", tokenizer=tokenizer, rope_layout="rotate_half")
    assert config == ModelConfig(**SIZES, **KINDS[kind], init_std=0.2)
    prompt = torch.randint(5, VOCAB_SIZE, (1, 12), generator=torch.Generator().manual_seed(2))
    ours = generate(
        load_model(tmp_path / "imported", torch.device("cpu")), prompt.tolist(), 20, Sampling(temperature=0)
    )
    expected = model.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert ours == [expected[0, 12:].tolist()]

    export_hf(tmp_path / "imported", tmp_path / "out", dtype=None, max_shard_bytes=10**9)
    there, back = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "out"))
    assert there.keys() == back.keys()
    assert all(torch.equal(back[name], there[name]) for name in there)
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["architectures"] == [ARCHITECTURES[kind][0]]
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")) is type(model)

    with pytest.raises(CheckpointError, match="a GGUF of ours is a plain Llama") as caught:
        export_gguf(tmp_path / "imported", tmp_path / "x.gguf", dtype=None)
    assert next(iter(KINDS[kind])) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "x.gguf").exists()
