"""What a recipe will come to: FLOPs, days, and the loss that published runs lead one to expect. By arithmetic alone."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.accounting import FLOPS_FORMULA, flops_per_token, parameter_count, parameter_shapes
from pretrain.batching import BatchPlan, steps_of
from pretrain.config import RecipeError, RunConfig, show
from pretrain.device_peaks import PEAKS, Peak
from pretrain.scaling_law import (
    FLOPS_PER_PARAMETER_AND_TOKEN,
    FORMULA,
    PUBLISHED,
    TOKENS_PER_PARAMETER,
    ScalingLaw,
    read_law,
)

DAY_SECONDS = 86_400
DAYS_FORMULA = "days = causal FLOPs / (devices · peak FLOP/s · MFU · 86,400)"
PARAMETERS_ARE = "all of them, embeddings included, as Hoffmann et al. count"
CAVEAT = (
    "Constants hold for the text, the tokenizer and the training they were fitted on, and for yours they do not: a "
    "token of yours may hold more or less text, and text be easier or harder. Trust differences between two plans more "
    "than values, and a sweep of your own (benchmarks/scaling_sweep.py, --fit) more than either."
)


@dataclass(frozen=True)
class Devices:
    """What a run is to run on: `mfu` of `count` devices' peak."""

    count: int
    name: str
    peak: Peak
    mfu: float

    @classmethod
    def asked(cls, count: int, name: str | None, peak_tflops: float | None, mfu: float, compute: str) -> Devices | None:
        """From a command line; None where it names no device. RecipeError: unknown, twice, or out of range."""
        if not 1 <= count < 2**31:
            raise RecipeError(f"--devices {show(count)}: must be at least 1 and below 2^31")
        if not 0 < mfu <= 1:
            raise RecipeError(f"--mfu {mfu:g}: a share of the peak, above 0 and at most 1, for example 0.4")
        if name is not None and peak_tflops is not None:
            raise RecipeError("--device and --peak-tflops both say what one device computes: give one of them")
        if peak_tflops is not None:
            if not 0 < peak_tflops < 1e9:
                raise RecipeError(f"--peak-tflops {peak_tflops:g}: 10^12 FLOPs a second of one device, above 0")
            return cls(count, "device", Peak(peak_tflops * 1e12, "--peak-tflops"), mfu)
        if name is None:
            if count != 1:
                raise RecipeError(f"--devices {count} of which kind? Add --device {'|'.join(PEAKS)} or --peak-tflops X")
            return None
        if name not in PEAKS:
            raise RecipeError(f"--device {show(name)}: known are {', '.join(PEAKS)}; of others give --peak-tflops X")
        if compute == "fp32":
            raise RecipeError(
                f'precision.compute = "fp32", and the peak known of {name} is of bf16 and fp16: give --peak-tflops X'
            )
        return cls(count, name, PEAKS[name], mfu)


@dataclass(frozen=True)
class Estimate:
    """A recipe's sums. FLOPs are of training, recomputed activations not counted."""

    config: RunConfig
    laws: tuple[ScalingLaw, ...]
    devices: Devices | None

    @property
    def parameters(self) -> int:
        """N."""
        return parameter_count(self.config.model)

    @property
    def without_embeddings(self) -> int:
        """N as Kaplan et al. (2020) count: neither embeddings nor an output matrix of its own."""
        shapes = parameter_shapes(self.config.model)
        named = [shape for name, shape in shapes.items() if name.startswith(("embed_", "lm_head"))]
        return self.parameters - sum(math.prod(shape) for shape in named)

    @property
    def tokens(self) -> int:
        """D: targets of all steps, padding among them where rows are padded."""
        samples = steps_of(self.config.batch).samples_before(self.config.schedule.max_steps)
        return samples * self.config.model.seq_len

    @property
    def flops(self) -> int:
        """By model/accounting's formula, attention causal."""
        return flops_per_token(self.config.model).causal * self.tokens

    @property
    def flops_6nd(self) -> int:
        return FLOPS_PER_PARAMETER_AND_TOKEN * self.parameters * self.tokens

    @property
    def days(self) -> float | None:
        if self.devices is None:
            return None
        rate = self.devices.count * self.devices.peak.flops * self.devices.mfu
        return self.flops / rate / DAY_SECONDS

    @property
    def not_divided(self) -> str | None:
        """Why the recipe as it is would not start with one rank a device; None where it would."""
        try:
            BatchPlan.from_config(self.config, self.devices.count if self.devices else 1)
        except RecipeError as error:
            return str(error)
        return None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; loss in nats a token."""
        devices = self.devices
        return {
            "parameters": self.parameters,
            "parameters_without_embeddings": self.without_embeddings,
            "parameters_are": PARAMETERS_ARE,
            "tokens": self.tokens,
            "tokens_per_parameter": self.tokens / self.parameters,
            "flops": self.flops,
            "flops_formula": FLOPS_FORMULA + "; causal",
            "flops_6nd": self.flops_6nd,
            "days": self.days,
            "days_formula": DAYS_FORMULA,
            "devices": None
            if devices is None
            else {
                "count": devices.count,
                "device": devices.name,
                "peak_flops": devices.peak.flops,
                "peak_source": devices.peak.source,
                "mfu": devices.mfu,
                "not_divided": self.not_divided,
            },
            "optimal_tokens_at_20": TOKENS_PER_PARAMETER * self.parameters,
            "loss_formula": FORMULA,
            "laws": [self._of_law(law) for law in self.laws],
            "caveat": CAVEAT,
        }

    def _of_law(self, law: ScalingLaw) -> dict[str, Any]:
        optimal, (size, tokens) = law.optimal_tokens(self.parameters), law.optimum(self.flops_6nd)
        return {
            **law.to_dict(),
            "expected_loss": law.loss(self.parameters, self.tokens),
            "of_size": law.of_size(self.parameters),
            "of_data": law.of_data(self.tokens),
            "optimal_tokens": optimal if math.isfinite(optimal) else None,
            "optimum_at_these_flops": {"parameters": size, "tokens": tokens, "loss": law.loss(size, tokens)},
            "outside": self._outside(law),
        }

    def _outside(self, law: ScalingLaw) -> list[str]:
        """Where the recipe is not among the runs that a law was fitted on."""
        told = []
        for what, value, fitted in (
            ("parameters", self.parameters, law.parameters),
            ("tokens", self.tokens, law.tokens),
        ):
            factor = fitted.beyond(value) if fitted is not None else None
            if fitted is not None and factor is not None:
                side = f"fewer {what} than" if value < fitted.least else f"the {what} of"
                end = f"its smallest, {fitted.least:.3g}" if value < fitted.least else f"its largest, {fitted.most:.3g}"
                told.append(f"{factor:,.1f} times {side} {end}")
        uniform = math.log(self.config.model.vocab_size)
        if law.loss(self.parameters, self.tokens) > uniform:
            told.append(f"worse than knowing nothing, ln(vocab_size) = {uniform:.2f}: it says nothing here")
        return told

    def to_text(self) -> str:
        """The same for people."""
        return "\n".join([*self._sums(), "", *self._time(), "", *self._optimum(), "", *self._expected()])

    def _sums(self) -> list[str]:
        size, tokens, config = self.parameters, self.tokens, self.config
        padded = ", padding included" if config.data.packing == "best_fit" else ""
        return [
            f"parameters        N = {size:,}: {PARAMETERS_ARE}",
            f"                  {self.without_embeddings:,} without embeddings",
            f"tokens            D = {tokens:,}{padded}: {tokens / size:.3g} per parameter",
            f"FLOPs             {self.flops:.4g} by matrices and causal attention (model count says how)",
            f"                  {self.flops_6nd:.4g} by 6·N·D, {self.flops_6nd / self.flops:.1%} of it",
        ]

    def _time(self) -> list[str]:
        devices, days = self.devices, self.days
        if devices is None or days is None:
            return ["days              not without a device: add --device h100 --devices 8 --mfu 0.4"]
        spent = f"{days:,.2f} days" if days >= 1 else f"{days * 24:,.2f} hours" if days > 1 / 24 else ""
        peak = f"{devices.peak.flops / 1e12:,.6g} TFLOP/s"
        lines = [
            f"days              {days:,.4g} = {spent or f'{days * 1440:,.2f} minutes'} on {devices.count:,} × "
            f"{devices.name}, {days * devices.count * 24:,.4g} device hours",
            f"                  {DAYS_FORMULA}",
            f"                  peak {peak} dense ({devices.peak.source}), MFU {devices.mfu:.0%} assumed",
        ]
        if self.not_divided is not None:
            lines += _wrapped(f"note: as it is, the recipe does not start on them: {self.not_divided}")
        return lines

    def _optimum(self) -> list[str]:
        size = self.parameters
        at_20 = TOKENS_PER_PARAMETER * size
        lines = [
            "compute-optimal: no other size does better with the FLOPs that this one takes for so many tokens",
            f"  {'about 20 a parameter (Hoffmann et al. 2022, arXiv 2203.15556)':<68} {at_20:>20,} tokens",
        ]
        for law in self.laws:
            optimal = law.optimal_tokens(size)
            told = f"{optimal:,.0f}" if optimal < 1e18 else f"{optimal:.3g}"
            lines.append(f"  {f'{law.name}, {optimal / size:,.3g} a parameter':<68} {told:>20} tokens")
        lines.append("for this recipe's 6·N·D FLOPs")
        for law in self.laws:
            best_size, tokens = law.optimum(self.flops_6nd)
            told = f"N = {best_size:,.3g}, D = {tokens:,.3g}: loss {law.loss(best_size, tokens):.3f}"
            lines.append(f"  {law.name}: {told}, this recipe {law.loss(size, self.tokens):.3f}")
        return lines

    def _expected(self) -> list[str]:
        lines = [
            f"expected held-out loss in nats a token, {FORMULA}",
            f"  {'':<24} {'loss':>7} = {'E':>7} + {'size':>7} + {'text':>7}    constants",
        ]
        for law in self.laws:
            parts = (
                law.loss(self.parameters, self.tokens),
                law.E,
                law.of_size(self.parameters),
                law.of_data(self.tokens),
            )
            loss, least, of_size, of_data = (f"{part:7.4f}" for part in parts)
            lines.append(
                f"  {law.name[:24]:<24} {loss} = {least} + {of_size} + {of_data}    E {law.E:.5g}, A {law.A:.5g}, "
                f"B {law.B:.6g}, alpha {law.alpha:.4g}, beta {law.beta:.4g}"
            )
        for law in self.laws:
            outside = self._outside(law)
            lines += _wrapped(f"{law.name}: {law.source}{'; beyond its runs: ' if outside else ''}{', '.join(outside)}")
        return lines + _wrapped(CAVEAT)


def estimate(config: RunConfig, devices: Devices | None = None, own_law: Path | None = None) -> Estimate:
    """Of a recipe; a law of one's own stands before the published ones. RecipeError: a law that cannot be read."""
    own = () if own_law is None else (read_law(own_law),)
    return Estimate(config, (*own, *PUBLISHED), devices)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 118, initial_indent="  ", subsequent_indent="  ")
