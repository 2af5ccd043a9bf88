"""What a model is: the sizes that define it, the presets, and the checks on both. No torch."""

import difflib
import re
import reprlib
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

FUSED_HEAD_DIMS = (64, 128)
ROPE_LAYOUTS = ("rotate_half", "interleaved")
MOST_LAYERS = 1000  # far beyond any decoder; what is told layer by layer stays quick
LIMITS = {int: 2**31, float: 1e30}  # what a tensor takes as a size, what fp32 holds with room for products


class ModelConfigError(ValueError):
    """A model description that cannot be built; the message is one line that says what to change."""


def _typed(name: str, kind: Any, value: Any) -> Any:
    """`value` as the field's type: numbers in their range, an int accepted for a float, a bool never for a number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ModelConfigError(f"{name} = {_show(value)} must be of type {kind.__name__}, not {type(value).__name__}")
    if is_number and not (0 < value < LIMITS[kind] and kind(value) < LIMITS[kind]):
        raise ModelConfigError(f"{name} = {_show(value)} must be positive, finite and below {LIMITS[kind]:g}")
    return kind(value)


def _show(value: object) -> str:
    """For an error line: cut where it is long or nested; Python refuses to write thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    return reprlib.repr(value)


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of one decoder.

    `seq_len` is the training window and the last position the RoPE tables know. `rope_layout` names which
    dimensions RoPE pairs: "rotate_half" i with i + head_dim/2 (Hugging Face), "interleaved" 2i with 2i + 1 (Meta). It
    travels with the weights, since weights read in another layout give no error, only nonsense.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    seq_len: int
    norm_eps: float
    tied: bool
    rope_base: float = 10000.0
    rope_layout: str = "rotate_half"
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _typed(field.name, field.type, getattr(self, field.name)))
        if self.n_layers > MOST_LAYERS:
            raise ModelConfigError(f"n_layers = {self.n_layers} is too deep: at most {MOST_LAYERS}")
        if self.n_heads % self.n_kv_heads:
            raise ModelConfigError(
                f"n_heads = {self.n_heads} must be a multiple of n_kv_heads = {self.n_kv_heads}: "
                "each key/value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ModelConfigError(f"head_dim = {self.head_dim} must be even: RoPE rotates pairs of dimensions")
        if self.rope_layout not in ROPE_LAYOUTS:
            raise ModelConfigError(f'rope_layout = "{self.rope_layout}" is unknown; known: {", ".join(ROPE_LAYOUTS)}')
        if self.head_dim not in FUSED_HEAD_DIMS:
            warnings.warn(
                f"head_dim = {self.head_dim}: fused attention kernels are tuned for 64 and 128; this will run slower",
                stacklevel=3,
            )

    @property
    def queries_per_kv_head(self) -> int:
        """How many query heads read one key/value head: query head h reads kv head h // queries_per_kv_head."""
        return self.n_heads // self.n_kv_heads

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values; `ModelConfig(**config.to_dict())` is the same config."""
        return asdict(self)


PRESETS: dict[str, ModelConfig] = {
    "0.5b": ModelConfig(
        vocab_size=32000,
        d_model=1536,
        n_layers=18,
        n_heads=12,
        n_kv_heads=4,
        head_dim=128,
        d_ff=4096,
        seq_len=2048,
        norm_eps=1e-5,
        tied=True,
    ),
    "mini": ModelConfig(
        vocab_size=4096,
        d_model=512,
        n_layers=12,
        n_heads=8,
        n_kv_heads=2,
        head_dim=64,
        d_ff=1408,
        seq_len=1024,
        norm_eps=1e-6,
        tied=True,
    ),
}


def from_table(table: Mapping[str, Any]) -> ModelConfig:
    """The config of a recipe's [model] table: `preset = "mini"` plus overrides, or every size spelt out.

    Raises ModelConfigError for an unknown preset or key (naming the nearest known one), a missing size, or a value
    of the wrong type.
    """
    values = dict(table)
    preset = values.pop("preset", None)
    known = [field.name for field in fields(ModelConfig)]
    for key in values:
        if key not in known:
            raise ModelConfigError(f'unknown key "{key}" in [model]{nearest(key, [*known, "preset"])}')
    if preset is not None:
        return replace(preset_named(preset), **values)
    missing = [name for name in known if name not in values and not hasattr(ModelConfig, name)]
    if missing:
        raise ModelConfigError(
            f"[model] lacks {', '.join(missing)}: set them, or start from preset = one of {', '.join(PRESETS)}"
        )
    return ModelConfig(**values)


def preset_named(name: object) -> ModelConfig:
    """The preset of that name. Raises ModelConfigError naming the nearest one."""
    if not isinstance(name, str) or name not in PRESETS:
        near = nearest(name, PRESETS) if isinstance(name, str) else ""
        raise ModelConfigError(f"unknown preset {_show(name)}{near}; presets: {', '.join(PRESETS)}")
    return PRESETS[name]


def checkpointing_period(mode: str) -> int:
    """Each how many-th block drops what it computed until backward: 0 for "none", 1 for "selective" and "full", N for
    "every-N", N from 2. ModelConfigError for any other word.
    """
    every = re.fullmatch(r"every-([1-9]\d{0,5})", mode)
    if mode in ("none", "selective", "full"):
        return 0 if mode == "none" else 1
    if every is None or every[1] == "1":
        raise ModelConfigError('should be "none", "selective", "every-N" with N from 2 (each N-th block), or "full"')
    return int(every[1])


def nearest(word: str, known: Any) -> str:
    """` (did you mean "x"?)` for the known word closest to `word`, or nothing when none is close."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f' (did you mean "{matches[0]}"?)' if matches else ""
