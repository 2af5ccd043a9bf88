"""What DeepSpeed's engines hold that keep whole weights and whole gradients, and what all engines share. No torch.

ZeRO-0 and, of ZeRO-1, bf16 with sums in fp32; those that cut gradients are in partitioned_memory.py. From DeepSpeed
0.19's bf16_optimizer.py and fp16/unfused_optimizer.py; docs/memory.md says which lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pretrain.memory_parts import Part, Place, Scene
from pretrain.memory_sizes import RankSizes

WHOLE_BUCKET = 500_000_000  # engine.py: MEMORY_OPT_ALLREDUCE_SIZE, which no key sets
# pretrain/adamw.py: elements updated at once where torch's fused kernel does not, and bytes it takes for each.
PIECE = {"cpu": 2**16, "cuda": 2**24}
PIECE_BYTES = 24
QUANTIZED_BLOCK = 256  # pretrain/eight_bit.py: moments of 8 bits that share an fp32 scale


class Engine:
    """What one of DeepSpeed's engines holds; each method gives parts, `held` those that are always there."""

    def __init__(self, facts: RankSizes) -> None:
        self.f = facts

    def held(self) -> list[Part]:
        raise NotImplementedError

    def starting(self) -> list[Scene]:
        """While model and engine are built. All else that is held is among it, but for the model's buffers.

        The model is drawn in fp32, a tied one with a head that the embedding then replaces, and cast a parameter at a
        time; on a GPU's machine that is main memory's. Then it is whole on the device.
        """
        f = self.f
        place: Place = "device" if f.device == "cpu" else "host"
        drawn = [Part("model in fp32", 4 * f.parameters, "4·P", place)]
        if f.tied:
            drawn.append(Part("head, before it is tied", 4 * f.embedding, "4·l", place))
        elif f.weight != 4:
            drawn.append(Part("a parameter, cast", f.weight * f.largest, f"{f.weight}·l", place))
        return [drawn, [self._whole()], *self.building()]

    def _whole(self) -> Part:
        return Part("whole model", self.f.weight * self.f.parameters, f"{self.f.weight}·P")

    def building(self) -> list[Scene]:
        """Of that the engine's own."""
        raise NotImplementedError

    def first(self) -> list[Part]:
        """What is held before the optimizer has a state: moments, momentum and compensation come in the first step."""
        return [part for part in self.held() if part not in self.state(masters=False)]

    def gathered(self, backward: bool = False) -> list[Part]:
        """Beside them while the model runs."""
        return []

    def gathering(self) -> list[Part]:
        """Beside those for a moment."""
        return []

    def between_micro_steps(self) -> list[Part]:
        """Beside them between the micro-steps of one update."""
        raise NotImplementedError

    def sums(self) -> list[Part]:
        """Beside them between the last backward of an update and its step."""
        return self.between_micro_steps()

    def resting(self) -> list[Part]:
        """Beside them between two calls of the engine, when most."""
        return self.between_micro_steps() if self.f.later else self.sums()

    def growing(self, gradients: int, later: bool) -> list[Part]:
        """Beside them in a backward pass, of which so many parameters have their gradient; `later`: earlier
        micro-batches have theirs.
        """
        raise NotImplementedError

    def reducing(self, later: bool) -> list[Scene]:
        """At the end of the last backward of an update."""
        raise NotImplementedError

    def stepping(self) -> list[Scene]:
        """In the update."""
        raise NotImplementedError

    def saving(self) -> Scene:
        """While a checkpoint is made, and at once written unless it is copied."""
        f = self.f
        if f.asynchronous:
            return []
        return [Part("copy of the weights, first rank", f.weight * f.parameters, f"{f.weight}·P", "host")]

    def copied(self) -> list[Part]:
        """The room of what is written while training goes on (snapshot.py), kept from the first step on."""
        f = self.f
        if not f.asynchronous:
            return []
        place: Place = "device" if f.device == "cpu" else "host"
        weights, symbol = (f.partition * f.ranks, "Q") if f.stage in (1, 2) else (f.parameters, "P")
        return [
            self._static("copy of weights, first rank", f.weight, weights, place, symbol),
            *(
                replace(part, name=f"copy of {part.name}", place=place, state=False)
                for part in self.state(self.has_masters)
            ),
        ]

    @property
    def has_masters(self) -> bool:
        """Whether there are masters beside the weights."""
        return True

    def state(self, masters: bool = True) -> list[Part]:
        """Masters, moments and compensation, where they are."""
        f, place = self.f, self.state_place
        parts = []
        if masters:
            parts.append(self._state("masters", f.master, f.partition, place))
        kept = {"muon": "momentum", "adamw8bit": "8-bit moments"}.get(f.optimizer) if f.hidden else None
        of_hidden = f.partitions[0] if kept else 0
        parts.append(self._state("moments", 2 * f.moment, f.partition - of_hidden, place))
        if kept == "momentum":
            parts.append(self._state("momentum of hidden matrices", f.moment, of_hidden, place))
        elif kept:
            scales = 2 * 4 * -(-of_hidden // QUANTIZED_BLOCK)
            parts.append(
                Part(
                    "8-bit moments of hidden matrices", 2 * of_hidden + scales, f"2·(1 + 4/{QUANTIZED_BLOCK})·p",
                    place, static=True, state=True,
                )
            )  # fmt: skip
        if f.compensated:
            parts.append(self._state("compensation", f.master, f.partition, place))
        return parts

    @property
    def state_place(self) -> Place:
        return self.f.place("offload_optimizer")

    def _zeros(self, count: int, symbol: str) -> list[Part]:
        """Gradients that the masters get at the start; those in main memory stay, and are among what is held."""
        f = self.f
        on_device = self.state_place == "device"
        return [Part("gradients of zeros", f.master * count, f"{f.master}·{symbol}")] if on_device else []

    def temporaries(self) -> list[Part]:
        """Of the optimizer's own arithmetic."""
        f = self.f
        if f.fused or self.state_place == "host":
            return []
        parts = [
            Part(
                "a piece being updated", PIECE_BYTES * min(PIECE[f.device], f.updated),
                f"{PIECE_BYTES}·min({PIECE[f.device]}, u)",
            )
        ]  # fmt: skip
        if f.optimizer == "muon":
            rows, columns = f.largest_matrix
            smaller = min(rows, columns)
            parts.append(
                Part("orthogonalization", 8 * rows * columns + 6 * smaller**2, "8·rows·columns + 6·min(rows, columns)²")
            )
        return parts

    def _state(self, name: str, each: int, count: int, place: Place = "device", symbol: str = "p") -> Part:
        return replace(self._static(name, each, count, place, symbol), state=True)

    def _static(self, name: str, each: int, count: int, place: Place = "device", symbol: str = "p") -> Part:
        return Part(name, each * count, f"{each}·{symbol}", place, static=True)

    def _flat_copy(self, tensors: Sequence[int], bucket: int, each: int) -> int:
        """Bytes of the largest flat copy of neighbouring tensors, each as many as it takes to pass `bucket`."""
        most = run = count = 0
        for size in tensors:
            run, count = run + size, count + 1
            if run > bucket:
                most, run, count = max(most, run if count > 1 else 0), 0, 0
        return each * max(most, run if count > 1 else 0)


class Replicated(Engine):
    """ZeRO-0: in fp32 the optimizer's own parameters, in bf16 fp16/unfused_optimizer.py."""

    @property
    def in_place(self) -> bool:
        return self.f.weight == 4

    @property
    def has_masters(self) -> bool:
        return not self.in_place

    def held(self) -> list[Part]:
        return [self._state("weights", self.f.weight, self.f.parameters, symbol="P"), *self.state(self.has_masters)]

    def between_micro_steps(self) -> list[Part]:
        return [self._state("gradients", self.f.weight, self.f.parameters, symbol="P")]

    def growing(self, gradients: int, later: bool) -> list[Part]:
        if later:
            return self.between_micro_steps()
        return [Part("gradients so far", self.f.weight * gradients, f"{self.f.weight}·g")]

    def reducing(self, later: bool) -> list[Scene]:
        f = self.f
        if f.alone:
            return [self.between_micro_steps()]
        flat = self._flat_copy([size for group in f.groups for size in group], WHOLE_BUCKET, f.weight)
        return [[*self.between_micro_steps(), Part("gradients in one piece", flat, f"{f.weight}·P")]]

    def building(self) -> list[Scene]:
        """DeepSpeed takes a step on zero gradients, unless it computes in fp32."""
        return [self.first()] if self.in_place else [[*self.held(), *scene] for scene in self.stepping()]

    def stepping(self) -> list[Scene]:
        f = self.f
        if self.in_place:
            return [[*self.between_micro_steps(), *self.temporaries()]]
        cast = Part("gradients in fp32", 4 * f.parameters, "4·P")
        return [[*self.between_micro_steps(), cast, *self.temporaries()]]


class Bf16(Replicated):
    """ZeRO-1, bf16 with sums in fp32: bf16_optimizer.py. Gradients stay whole, and are added to a whole fp32 buffer."""

    def held(self) -> list[Part]:
        f, whole = self.f, self.f.partition * self.f.ranks
        return [
            self._state("weights", f.weight, whole, symbol="Q"),
            self._state("accumulation buffer", f.summed, whole, symbol="Q"),
            *self.state(),
        ]

    def building(self) -> list[Scene]:
        return [self.first()]

    def reducing(self, later: bool) -> list[Scene]:
        f = self.f
        if f.alone:
            return [self.between_micro_steps()]
        groups = [part * f.ranks for part in f.partitions]
        flat = self._flat_copy(groups, WHOLE_BUCKET, f.summed)
        scene = [*self.between_micro_steps(), Part("sums in one piece", flat, f"{f.summed}·Q")]
        if f.sent != f.summed:
            sent = f.sent * (flat // f.summed or max(groups))
            scene.append(Part("sums as they are sent", sent, f"{f.sent}·Q"))
        return [scene]

    def stepping(self) -> list[Scene]:
        return [
            [*self.between_micro_steps(), *self.temporaries()],
            [*self.between_micro_steps(), *gloo_gather(self.f)],
        ]


def gloo_copy(f: RankSizes, what: str, size: int, formula: str) -> list[Part]:
    """What gloo takes beside, on CPUs; NCCL works in place."""
    return [Part(f"gloo's copy of {what}", size, formula)] if f.device == "cpu" and f.ranks > 1 else []


def gloo_gather(f: RankSizes) -> list[Part]:
    """When a flat group of weights is gathered."""
    return gloo_copy(f, "gathered weights", f.weight * max(f.partitions) * f.ranks, f"{f.weight}·u·N")
