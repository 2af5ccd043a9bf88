"""What a model is: the sizes and components that define it, the presets, and the checks on both. No torch."""

import difflib
import re
import reprlib
import typing
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

FUSED_HEAD_DIMS = (64, 128)
ROPE_LAYOUTS = ("rotate_half", "interleaved")
CHOICES = {  # of the axes that have names; the first is Llama's
    "norm": ("rms", "layer"),
    "norm_place": ("pre", "post", "deepnorm"),
    "ffn": ("swiglu", "relu", "gelu"),
    "positions": ("rope", "none", "sinusoidal", "learned"),
    "attention": ("gqa", "mla"),
    "residual": ("plain", "hyper"),
    "rope_scaling": ("none", "linear", "dynamic", "yarn"),
}
MOST_STREAMS = 64  # each is a residual stream as large as the model's activations
MOST_LAYERS = 1000  # far beyond any decoder; what is told layer by layer stays quick
LIMITS = {int: 2**31, float: 1e30}  # what a tensor takes as a size, what fp32 holds with room for products


class ModelConfigError(ValueError):
    """A model description that cannot be built; the message is one line that says what to change."""


def _typed(name: str, kind: Any, value: Any) -> Any:
    """`value` as the field's type: numbers in their range, an int accepted for a float, a bool never for a number."""
    if optional := typing.get_args(kind):
        if value is None:
            return None
        kind = optional[0]
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
    """The sizes and components of one decoder.

    `seq_len` is the training window and the last position the RoPE tables know. `rope_layout` names which
    dimensions RoPE pairs: "rotate_half" i with i + head_dim/2 (Hugging Face), "interleaved" 2i with 2i + 1 (Meta). It
    travels with the weights, since weights read in another layout give no error, only nonsense.

    The fields behind `init_std` choose the components; their defaults are Llama's, and CHOICES lists the words of those
    that are words. `bias`: in every linear layer but the head. "gqa" is multi-head attention where n_kv_heads =
    n_heads, multi-query where it is 1. `sliding_window`: a query sees itself and so many less one before; None is all.
    `mla_latent` and `mla_rope_dim`: numbers a token and layer that multi-head latent attention caches, of keys and
    values together, and of the rotary part. `rope_original_seq_len`: the window that a scaled RoPE was trained with.
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
    norm: str = "rms"
    norm_place: str = "pre"
    bias: bool = False
    ffn: str = "swiglu"
    positions: str = "rope"
    attention: str = "gqa"
    qk_norm: bool = False
    sliding_window: int | None = None
    residual: str = "plain"
    n_streams: int = 1
    mla_latent: int | None = None
    mla_rope_dim: int | None = None
    rope_scaling: str = "none"
    rope_scaling_factor: float = 1.0
    rope_original_seq_len: int | None = None

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
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise ModelConfigError(
                    f"{name} = {_show(value)} is unknown{nearest(value, known)}; known: {', '.join(known)}"
                )
        for fault in _contradictions(self):
            raise ModelConfigError(fault)
        if self.head_dim not in FUSED_HEAD_DIMS:
            warnings.warn(
                f"head_dim = {self.head_dim}: fused attention kernels are tuned for 64 and 128; this will run slower",
                stacklevel=2,  # a place that is the same for all callers: once a process
            )

    @property
    def queries_per_kv_head(self) -> int:
        """How many query heads read one key/value head: query head h reads kv head h // queries_per_kv_head."""
        return self.n_heads // self.n_kv_heads

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values; `ModelConfig(**config.to_dict())` is the same config.

        Choices of components that are Llama's are left out, and so is what is None: TOML has no word for it.
        """
        return {
            name: value for name, value in asdict(self).items() if name not in COMPONENTS or value != COMPONENTS[name]
        }


_NAMES = [field.name for field in fields(ModelConfig)]
COMPONENTS = {field.name: field.default for field in fields(ModelConfig)[_NAMES.index("norm") :]}  # as Llama has them


def _contradictions(config: ModelConfig) -> Iterator[str]:
    """What is wrong with choices that are each known, a line a fault: no field is set that nothing would read."""
    mla = config.attention == "mla"
    for name in ("mla_latent", "mla_rope_dim"):
        value = getattr(config, name)
        if mla and value is None:
            yield f'attention = "mla" needs {name}: set it, to 4 · head_dim (mla_latent) or head_dim / 2 (mla_rope_dim)'
        if not mla and value is not None:
            yield f'{name} = {value} is for attention = "mla": leave it out, or choose that'
    if mla and config.positions != "rope":
        yield (
            f'attention = "mla" has positions in its rotary part alone: positions = "{config.positions}" must be "rope"'
        )
    if mla and config.qk_norm:
        yield 'qk_norm is not for attention = "mla": no key is kept that it could norm, and the latent has its own norm'
    if mla and config.n_kv_heads != config.n_heads:
        yield (
            f'attention = "mla" makes keys and values for each query head out of the latent: n_kv_heads = '
            f"{config.n_kv_heads} must be n_heads = {config.n_heads}"
        )
    if mla and config.mla_rope_dim is not None and config.mla_rope_dim % 2:
        yield f"mla_rope_dim = {config.mla_rope_dim} must be even: RoPE rotates pairs of dimensions"
    if config.positions == "sinusoidal" and config.d_model % 2:
        yield f'd_model = {config.d_model} must be even for positions = "sinusoidal": a sine and a cosine a frequency'
    if config.sliding_window == 1:
        yield "sliding_window = 1 leaves a token itself alone to look at: set 2 or more, or leave it out"
    if config.residual == "hyper" and config.norm_place != "pre":
        yield (
            f'residual = "hyper" needs norm_place = "pre", not "{config.norm_place}": '
            "no norm stands on the residual streams"
        )
    if config.residual == "plain" and config.n_streams != 1:
        yield f'n_streams = {config.n_streams} is for residual = "hyper": leave it out, or choose that'
    if config.n_streams > MOST_STREAMS:
        yield f"n_streams = {config.n_streams} is too many: at most {MOST_STREAMS}"
    yield from _scaling_contradictions(config)


def _rotary_dim(config: ModelConfig) -> int | None:
    return config.mla_rope_dim if config.attention == "mla" else config.head_dim


def _scaling_contradictions(config: ModelConfig) -> Iterator[str]:
    scaled, original = config.rope_scaling != "none", config.rope_original_seq_len
    if scaled and config.positions != "rope":
        yield f'rope_scaling = "{config.rope_scaling}" needs positions = "rope", not "{config.positions}"'
    if config.rope_scaling == "dynamic" and _rotary_dim(config) == 2:
        yield 'rope_scaling = "dynamic" needs more than the 2 dimensions that turn here: one pair has no slower one'
    if config.rope_scaling == "yarn" and config.rope_base <= 1:
        yield f'rope_scaling = "yarn" needs a rope_base above 1, not {config.rope_base}: its pairs turn at one speed'
    if config.rope_scaling_factor < 1:
        yield f"rope_scaling_factor = {config.rope_scaling_factor} must be at least 1: it stretches the window"
    if not scaled and config.rope_scaling_factor != 1:
        yield f"rope_scaling_factor = {config.rope_scaling_factor} is for rope_scaling: choose one of its ways"
    if not scaled and original is not None:
        yield f"rope_original_seq_len = {original} is for rope_scaling: choose one of its ways, or leave it out"
    if scaled and original is None:
        yield f'rope_scaling = "{config.rope_scaling}" needs rope_original_seq_len: the seq_len of the training before'


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
    "classic": ModelConfig(  # the block of Vaswani et al. 2017
        vocab_size=4096,
        d_model=512,
        n_layers=4,
        n_heads=8,
        n_kv_heads=8,
        head_dim=64,
        d_ff=2048,
        seq_len=512,
        norm_eps=1e-5,
        tied=False,
        norm="layer",
        norm_place="post",
        bias=True,
        ffn="relu",
        positions="sinusoidal",
    ),
    "gpt2": ModelConfig(  # GPT-2 small (Radford et al. 2019)
        vocab_size=50257,
        d_model=768,
        n_layers=12,
        n_heads=12,
        n_kv_heads=12,
        head_dim=64,
        d_ff=3072,
        seq_len=1024,
        norm_eps=1e-5,
        tied=True,
        norm="layer",
        bias=True,
        ffn="gelu",
        positions="learned",
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
