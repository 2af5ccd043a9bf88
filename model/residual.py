"""The residual as several streams: hyper-connections (Zhu et al. 2024, arXiv 2409.19606), kept on a manifold.

Instead of one stream x there are n. A sublayer f reads one mixture of them and writes to all, while they mix:

    X ← M X + w ⊗ f(r · X),        r, w: n numbers, read and write gates;  M: n · n

(static hyper-connections, eq. 2 to 5 there). With M free, a product of many of them grows or dies over depth. So M is
doubly stochastic, rows and columns of non-negative numbers that sum to 1, as is then every product of them: what the
streams hold together, their mean, passes all layers unchanged ("mHC", arXiv 2512.24880, section 4.1). It is what
Sinkhorn and Knopp's iteration makes of exp(logits), which are learnt. Gates are learnt too, and free; the parts of both
papers in which they depend on the input are left out.

One stream with both gates 1 is the plain residual, exactly. The streams begin as copies of one another, M within 1e-3
of the identity (exp is positive: the identity itself is out of reach), every write gate at 1, and each sublayer reads
one stream, in turn: so a model begins with the outputs of the plain one, and the streams part as they are trained.

Suffixes: n, m streams, b batch, t tokens, d model width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

OFF_DIAGONAL = -8.0  # of the logits at the beginning: exp(-8) = 3.4e-4
ITERATIONS = 20  # as in mHC; near the identity one or two are enough


def doubly_stochastic(logits_nm: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """exp(logits), its columns and its rows divided by their sums in turn (Sinkhorn & Knopp 1967); same shape.

    Rows end exact to rounding, columns as close as the iterations bring them.
    """
    matrix_nm = (logits_nm - logits_nm.amax()).exp()
    for _ in range(iterations):
        matrix_nm = matrix_nm / matrix_nm.sum(dim=0, keepdim=True)
        matrix_nm = matrix_nm / matrix_nm.sum(dim=1, keepdim=True)
    return matrix_nm


class HyperConnection(nn.Module):
    """How one sublayer, the `number`-th of the model, stands among the streams.

    Sums over streams are formed in fp32 and rounded once: bf16 would round M's rows to sums other than 1, and of what
    passes all layers each would take a part.
    """

    def __init__(self, n_streams: int, number: int) -> None:
        super().__init__()
        self.reads_first = number % n_streams
        self.read_gates = nn.Parameter(torch.empty(n_streams))
        self.write_gates = nn.Parameter(torch.empty(n_streams))
        self.mixing_logits = nn.Parameter(torch.empty(n_streams, n_streams))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """As they begin."""
        self.read_gates.zero_()[self.reads_first] = 1.0
        self.write_gates.fill_(1.0)
        self.mixing_logits.fill_(OFF_DIAGONAL).fill_diagonal_(0.0)

    def forward(self, x_nbtd: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """The streams behind the sublayer, which is given (b, t, d) and gives back the same; dtype of x."""
        exact_nbtd = x_nbtd.to(torch.promote_types(x_nbtd.dtype, torch.float32))
        read_n, write_n, logits_nm = (
            gates.to(exact_nbtd.dtype) for gates in (self.read_gates, self.write_gates, self.mixing_logits)
        )
        out_btd = sublayer(torch.tensordot(read_n, exact_nbtd, dims=1).to(x_nbtd.dtype))
        mixed_nbtd = torch.tensordot(doubly_stochastic(logits_nm), exact_nbtd, dims=1)
        new_nbtd: Tensor = mixed_nbtd + write_n[:, None, None, None] * out_btd
        return new_nbtd.to(x_nbtd.dtype)


def spread(x_btd: Tensor, n_streams: int) -> Tensor:
    """(n, b, t, d): as many copies, a view."""
    return x_btd.expand(n_streams, *x_btd.shape)


def gather(x_nbtd: Tensor) -> Tensor:
    """The mean of the streams, (b, t, d), formed in fp32."""
    if x_nbtd.shape[0] == 1:
        return x_nbtd[0]
    return x_nbtd.mean(dim=0, dtype=torch.promote_types(x_nbtd.dtype, torch.float32)).to(x_nbtd.dtype)
