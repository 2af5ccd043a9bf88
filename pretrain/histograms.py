"""How a run's weights and gradients are spread, as histograms, at steps far apart.

Nothing that is trained differs by a bit for them: weights are only read, and gradients are seen on their way, as
backward hands them over. So a gradient's is that of the first rank's last micro-batch, before ranks are averaged and
the norm is clipped: as large as the step's gradient, and noisier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pretrain.sinks import Histogram

if TYPE_CHECKING:
    from torch import Tensor

    from pretrain.engine import TrainingEngine

BINS = 64


def histogram_of(tensor: Tensor, factor: float = 1.0) -> Histogram | None:
    """Of all numbers of a tensor times `factor`, in BINS equal steps from the smallest to the largest.

    Those that are not finite are left out; None where no other is left.
    """
    values = tensor.detach().float().flatten() * factor
    values = values[values.isfinite()]
    if not len(values):
        return None
    low, high = (float(bound) for bound in values.aminmax())
    if high <= low:  # all the same
        low, high = low - abs(low) / 2 - 1e-30, high + abs(high) / 2 + 1e-30
    counts = values.histc(BINS, low, high)
    step = (high - low) / BINS
    return Histogram(
        edges=[low + step * number for number in range(BINS)] + [high],
        counts=counts.tolist(),
        number=len(values),
        sum=float(values.sum(dtype=values.double().dtype)),
        sum_of_squares=float(values.double().square().sum()),
    )


class Spreads:
    """One rank's. All ranks ask for the same steps, since under ZeRO-3 a weight is whole for all or for none."""

    def __init__(self, engine: TrainingEngine, every_steps: int | None) -> None:
        """`every_steps`: None for never."""
        self._engine, self._every_steps = engine, every_steps
        self._gradients: dict[str, Histogram] = {}

    def due(self, step: int) -> bool:
        return self._every_steps is not None and step % self._every_steps == 0

    @contextmanager
    def seen(self, step: int) -> Iterator[None]:
        """While the step is made inside, look at the gradients, if it is one of those."""
        self._gradients = {}
        if not (self.due(step) and self._engine.ranks.is_first):
            yield
            return
        named = self._engine.transformer.named_parameters()
        handles = [_hooked(parameter, self._see(name)) for name, parameter in named]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, name: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            # DeepSpeed divides the loss by the accumulation steps, and in fp16 multiplies it by the loss scale.
            found = histogram_of(gradient, self._engine.gradient_factor)
            if found is not None:
                self._gradients[name] = found

        return look

    def take(self) -> dict[str, Histogram]:
        """Behind a step that was seen: its gradients, and the weights as they are now. All ranks together.

        Empty on all ranks but the first.
        """
        found = {f"gradients/{name}": one for name, one in self._gradients.items()}
        for name, weight in self._engine.weights():
            if self._engine.ranks.is_first and (one := histogram_of(weight)) is not None:
                found[f"weights/{name}"] = one
        self._gradients = {}
        return found


def _hooked(parameter: Any, look: Callable[[Tensor], None]) -> Any:
    return parameter.register_hook(look)
