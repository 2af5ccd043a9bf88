"""Next-token cross-entropy that never holds all logits.

Logits are the largest tensor of a small model by far: 16 × 2048 tokens × 32,000 ids are 4.2 GB in fp32, several times
over with their gradient. Here the head and the loss run chunk by chunk, and the gradients of the hidden states and of
the head's weight are formed on the way, in the forward pass: the loss is the end of the model, so all that backward
adds is one factor. No logits are kept, and none are computed twice.

The price is a gradient of the head's weight between forward and backward, in fp32 where there are several chunks: a sum
in bf16 would lose of each chunk what is below 1/256 of the sum so far.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORED = -100
ROWS = 512  # of a gradient that is cast, at a time: there is no second one in the other dtype
FUSED_ON = ("cuda",)  # kinds of device on which a fused kernel is tried

Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


class LossSum(NamedTuple):
    """Sums over tokens and how many there were: a mean per batch would misweight batches of unequal size."""

    loss_sum: Tensor
    """() fp32, nats: what is minimised, cross-entropy and, where it is on, z-loss. Carries the gradient."""
    token_count: Tensor
    """() int64, targets that count."""
    cross_entropy_sum: Tensor
    """() fp32, nats: what is reported, the cross-entropy alone. Carries no gradient."""


class Head(nn.Linear):
    """The matrix that turns hidden states into logits or, where targets are given, into their loss.

    The loss is computed within this module's call, so that an engine that gathers a module's weights when it is called
    (ZeRO-3) has them whole here.
    """

    def __init__(self, d_model: int, vocab_size: int) -> None:
        super().__init__(d_model, vocab_size, bias=False)

    def forward(  # type: ignore[override]  # a Linear that can do one thing more
        self, hidden_btd: Tensor, targets_bt: Tensor | None = None, chunk_tokens: int = 1024, z_loss: float = 0.0
    ) -> Tensor | LossSum:
        if targets_bt is None:
            return super().forward(hidden_btd)
        return next_token_loss(hidden_btd, self.weight, targets_bt, chunk_tokens, z_loss)


def next_token_loss(
    hidden_btd: Tensor, weight_vd: Tensor, targets_bt: Tensor, chunk_tokens: int, z_loss: float = 0.0
) -> LossSum:
    """Summed cross-entropy of hidden · weightᵀ against targets; targets of -100 are left out of sums and count.

    z_loss · (log Σ exp logits)² is added for every token: it holds the logits' scale, which cross-entropy leaves free
    (Chowdhery et al. 2022, PaLM, section 5, with 1e-4). 0 is off.

    Equal to the plain loss and its gradients within fp32 rounding. Holds up to 10 bytes × chunk_tokens × vocab_size at
    a time, and from forward to backward the gradients of hidden (in its dtype) and of weight (fp32). On a GPU Liger's
    fused kernel, which chooses its own chunks, takes over where `fused_kernel` finds it.
    """
    hidden_nd, targets_n = hidden_btd.flatten(0, 1), targets_bt.flatten()
    forms_gradients = torch.is_grad_enabled() and (hidden_nd.requires_grad or weight_vd.requires_grad)
    kernel = fused_kernel() if forms_gradients and hidden_nd.device.type in FUSED_ON else None
    if kernel is not None:
        loss_sum, cross_entropy_sum = kernel(hidden_nd, weight_vd, targets_n, z_loss)
    else:
        loss_sum, cross_entropy_sum = _chunked(hidden_nd, weight_vd, targets_n, z_loss, chunk_tokens, forms_gradients)
    return LossSum(loss_sum, (targets_n != IGNORED).sum(), cross_entropy_sum)


def _chunked(*inputs: Any) -> tuple[Tensor, Tensor]:
    outputs: tuple[Tensor, Tensor] = _ChunkedLoss.apply(*inputs)  # type: ignore[no-untyped-call]
    return outputs


class _ChunkedLoss(torch.autograd.Function):
    """(what is minimised, cross-entropy), both summed; the gradients of the first are formed beside it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_nd: Tensor,
        weight_vd: Tensor,
        targets_n: Tensor,
        z_loss: float,
        chunk_tokens: int,
        forms_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        cross_entropy_sum, log_z_square_sum = hidden_nd.new_zeros(2, dtype=torch.float32).unbind()
        grad_hidden_nd = torch.empty_like(hidden_nd) if forms_gradients else None
        grad_weight_vd = None
        for start in range(0, len(targets_n), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            cross_entropy, log_z_square, grad_logits_cv = _chunk(
                hidden_nd[rows], weight_vd, targets_n[rows], z_loss, forms_gradients
            )
            cross_entropy_sum, log_z_square_sum = cross_entropy_sum + cross_entropy, log_z_square_sum + log_z_square
            if grad_hidden_nd is not None and grad_logits_cv is not None:
                grad_hidden_nd[rows] = grad_logits_cv @ weight_vd
                product_vd = grad_logits_cv.T @ hidden_nd[rows]
                del grad_logits_cv
                if grad_weight_vd is not None:
                    _add(grad_weight_vd, product_vd)
                else:
                    grad_weight_vd = product_vd.float() if chunk_tokens < len(targets_n) else product_vd
                del product_vd  # before the next chunk's logits
        if forms_gradients:
            ctx.save_for_backward(
                grad_hidden_nd, torch.zeros_like(weight_vd) if grad_weight_vd is None else grad_weight_vd
            )
            ctx.dtypes = hidden_nd.dtype, weight_vd.dtype
        ctx.mark_non_differentiable(cross_entropy_sum)
        return cross_entropy_sum + z_loss * log_z_square_sum, cross_entropy_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = (_scaled(one, factor, dtype) for one, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return *grads, None, None, None, None


def _add(sum_vd: Tensor, product_vd: Tensor) -> None:
    """In place, some rows at a time: on a CPU torch first makes a copy of the one in the dtype of the other."""
    for start in range(0, len(sum_vd), ROWS):
        rows = slice(start, start + ROWS)
        sum_vd[rows].add_(product_vd[rows])


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The product by an fp32 factor of no dimension; one rounded to bf16 would be wrong by up to 1/512.

    On a CPU torch multiplies half precision by such a factor in fp32, elsewhere it rounds the factor first. Some rows
    at a time, so that the product in fp32 is never there as a whole.
    """
    scaled = torch.empty_like(gradient, dtype=dtype)
    for start in range(0, len(gradient), ROWS):
        rows = slice(start, start + ROWS)
        scaled[rows] = (gradient[rows] if gradient.device.type == "cpu" else gradient[rows].float()) * factor
    return scaled


def _chunk(
    hidden_cd: Tensor, weight_vd: Tensor, targets_c: Tensor, z_loss: float, forms_gradients: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sums of the cross-entropy and of (log Z)² over one chunk, Z = Σ exp logits, and the gradient of its logits.

    With p = softmax(logits): the gradient of cross-entropy is p - 1 at the target and p elsewhere, that of log Z is p.
    """
    counts_c1 = (targets_c != IGNORED)[:, None].float()
    target_c1 = targets_c.masked_fill(targets_c == IGNORED, 0)[:, None]
    logits_cv = hidden_cd @ weight_vd.T
    log_p_cv = F.log_softmax(logits_cv, dim=-1, dtype=torch.float32)
    target_log_p_c1 = log_p_cv.gather(1, target_c1)
    log_z_c1 = logits_cv.gather(1, target_c1) - target_log_p_c1
    del logits_cv
    cross_entropy, log_z_square = -(target_log_p_c1 * counts_c1).sum(), (log_z_c1.square() * counts_c1).sum()
    if not forms_gradients:
        return cross_entropy, log_z_square, None
    grad_logits_cv = log_p_cv.exp_().mul_(counts_c1 * (1.0 + 2.0 * z_loss * log_z_c1))
    grad_logits_cv.scatter_add_(1, target_c1, -counts_c1)
    return cross_entropy, log_z_square, grad_logits_cv.to(weight_vd.dtype)


# ---------------------------------------------------------------- a fused kernel for GPUs


@functools.cache
def fused_kernel() -> Kernel | None:
    """Liger's fused head and loss (Hsu et al. 2024); None, with a warning, where it is absent, fails or is off.

    Tried once a process on a small case in bf16, loss and gradients against the chunks, since it depends on GPU, driver
    and compiler.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        errors = _errors(_liger, device)
        fault = None if all(error < 0.02 for error in errors) else f"loss and gradients are off by {errors}"
    except ModuleNotFoundError as error:
        fault = f"{str(error.name).partition('.')[0]} is not installed"
    except Exception as error:  # a compiler may fail in any way; whatever it is, the loss goes on without it
        fault = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if fault is None:
        return _liger
    warnings.warn(f"Liger's fused loss does not run here ({fault}): the loss is computed in chunks", stacklevel=2)
    return None


def _liger(hidden_nd: Tensor, weight_vd: Tensor, targets_n: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    no_bias, no_class_weights, no_smoothing, no_softcap, returns_z_loss = None, None, 0.0, None, True
    loss_sum, z_loss_sum, *_ = LigerFusedLinearCrossEntropyFunction.apply(
        hidden_nd, weight_vd, targets_n, no_bias, no_class_weights, IGNORED, z_loss, no_smoothing, "sum", no_softcap,
        returns_z_loss, torch.float32,
    )  # fmt: skip
    return loss_sum, loss_sum.detach() - z_loss_sum.detach()


def _errors(kernel: Kernel, device: torch.device) -> list[float]:
    """How far a kernel is from the chunks, relative: both sums, the gradients of hidden and weight."""
    generator = torch.Generator().manual_seed(0)
    hidden_nd = torch.randn(300, 128, generator=generator).to(device, torch.bfloat16).requires_grad_()
    weight_vd = (0.1 * torch.randn(1000, 128, generator=generator)).to(device, torch.bfloat16).requires_grad_()
    targets_n = torch.randint(1000, (300,), generator=generator).to(device)
    targets_n[::7] = IGNORED

    def outcome(of: Callable[..., tuple[Tensor, Tensor]], *chunks: Any) -> list[Tensor]:
        loss_sum, cross_entropy_sum = of(hidden_nd, weight_vd, targets_n, 0.01, *chunks)
        return [loss_sum.detach(), cross_entropy_sum, *torch.autograd.grad(3.0 * loss_sum, (hidden_nd, weight_vd))]

    pairs = zip(outcome(kernel), outcome(_chunked, 100, True), strict=True)
    return [float((one - other).float().norm() / other.float().norm()) for one, other in pairs]
