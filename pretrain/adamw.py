"""AdamW that computes in fp32 whatever its weights and moments are stored in.

torch.optim.AdamW does for weights and moments of one dtype that are rounded to the nearest. This one is for the rest:
bf16 weights that are compensated (`rounding`), and moments of another dtype. It goes through the flat partition of a
rank piece by piece, so that its fp32 temporaries are those of a piece: about PIECE × 24 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from pretrain.rounding import add_kahan, add_nearest, add_stochastic, generator_of

Compensation = Literal["none", "kahan", "stochastic"]
Group = dict[str, Any]
State = dict[str, Any]

# Elements that are updated at once: on a CPU what its caches hold, on a GPU enough to keep it busy.
PIECE = {"cpu": 2**16, "cuda": 2**24}


class PiecewiseAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019, algorithm 2, the decay multiplied by the learning rate as torch has it).

    m ← β₁m + (1−β₁)g;  v ← β₂v + (1−β₂)g²;  w ← w − lr·(m̂ / (√v̂ + eps) + weight_decay·w),  m̂ and v̂ without bias.
    The update uses m and v before they are rounded to their dtype. Weights in fp32 or bf16.

    Random numbers of rounding are drawn for (seed, rank, step, parameter): the same in every resumed run.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        moments: torch.dtype,
        compensation: Compensation = "none",
        seed: int = 0,
        rank: int = 0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.moments = moments
        self.compensation = compensation
        self.seed = seed
        self.rank = rank

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                state: State = self.state[weights]
                if not state:
                    # Which of this rank's parameters this is, for its random numbers.
                    state["number"] = sum(bool(other) for other in self.state.values())
                    state["step"] = torch.zeros(())
                    if self.compensation == "kahan":
                        state["lost"] = torch.zeros_like(weights)
                    state.update(self.new_moments(weights, group))
                state["step"] += 1
                self.update(weights, weights.grad, state, group)

    def new_moments(self, weights: Tensor, group: Group) -> State:
        """What is kept for `weights` beside the step count and what Kahan summation has left over."""
        return {name: torch.zeros_like(weights, dtype=self.moments) for name in ("exp_avg", "exp_avg_sq")}

    def update(self, weights: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        """One step of one flat partition, in place."""
        step, lr, decay = int(state["step"]), group["lr"], group["weight_decay"]
        add = self.adder(weights.device, state)
        flat = weights, gradient, state["exp_avg"], state["exp_avg_sq"], state.get("lost", weights)
        for w, g, m, v, lost in pieces(*flat):
            update = direction(g, m, v, step, group["betas"], group["eps"])
            add(w, update.add_(w, alpha=decay).mul_(-lr), lost)

    def adder(self, device: torch.device, state: State) -> Callable[[Tensor, Tensor, Tensor], None]:
        """What adds an fp32 update to weights; its third argument is what Kahan summation has left over."""
        if self.compensation == "none":
            return lambda weights, update, _: add_nearest(weights, update)
        generator = generator_of(device, self.seed, self.rank, int(state["step"]), state["number"])
        if self.compensation == "kahan":
            return lambda weights, update, lost: add_kahan(weights, update, lost, generator)
        return lambda weights, update, _: add_stochastic(weights, update, generator)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch does, but each state comes back in the dtype it was saved in: torch casts all to the weights'."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    self.state[parameter][name] = value.detach().to(parameter.device, copy=True)


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of tensors of one size, flat, PIECE elements of each at a time."""
    size = PIECE[tensors[0].device.type]
    return zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True)


def direction(
    gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, betas: tuple[float, float], eps: float
) -> Tensor:
    """m̂ / (√v̂ + eps) of AdamW's update `step` (from 1) in fp32, any shape; both moments are moved on in place."""
    beta1, beta2 = betas
    g = gradient.float()
    m = exp_avg.float().lerp(g, 1 - beta1)
    v = exp_avg_sq.float().lerp(g.square(), 1 - beta2)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    denominator = v.div_(1 - beta2**step).sqrt_().add_(eps)
    return m.div_(1 - beta1**step).div_(denominator)
