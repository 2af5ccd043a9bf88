"""What all ranks hold alike, compared: a bit that flipped on one of them, or a collective that gave it other sums,
would train several models that are taken for one.

Of each tensor two sums modulo 2^64 of the integers that its bits spell, plain and weighted by place (the idea of
Fletcher's checksum, 1982): one changed element changes the first, two that changed places the second. They are formed
where the tensor lies; ranks exchange one hash of all of them, and only where hashes differ the sums themselves.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.runtime import Ranks

AT_ONCE = 1 << 20  # elements
ODD = 1_000_003  # by which pieces are told apart: invertible modulo 2^64, so that no change is lost behind it
SPELLED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
NAMED = 3  # tensors of those that differ


@dataclass(frozen=True)
class Mismatch:
    """Ranks that hold something else than most do, and of which tensors."""

    ranks: tuple[int, ...]
    tensors: tuple[str, ...]

    def __str__(self) -> str:
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        more = f" and {len(self.tensors) - NAMED} more" if len(self.tensors) > NAMED else ""
        return f"{ranks} differ{'' if len(self.ranks) > 1 else 's'} in {', '.join(self.tensors[:NAMED])}{more}"


def compare(ranks: Ranks, held: Mapping[str, Tensor]) -> Mismatch | None:
    """None where all ranks hold the same bits under the same names, in the same order. On all ranks together."""
    sums = checksums(list(held.values()))
    own = hashlib.blake2b(repr((list(held), sums)).encode(), digest_size=16).digest()
    if len(set(ranks.gather(own))) == 1:
        return None
    everyones: list[dict[str, list[int]]] = ranks.gather(dict(zip(held, sums, strict=True)))
    return _mismatch(everyones)


def _mismatch(everyones: Sequence[Mapping[str, list[int]]]) -> Mismatch:
    """Most is right, and of equally many those with the first rank."""
    odd: set[int] = set()
    tensors = []
    for name in dict.fromkeys(name for one in everyones for name in one):
        found = [tuple(one.get(name, ())) for one in everyones]
        usual = Counter(found).most_common(1)[0][0]
        others = {rank for rank, sums in enumerate(found) if sums != usual}
        if others:
            tensors.append(name)
            odd |= others
    return Mismatch(tuple(sorted(odd)), tuple(tensors))


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The two sums of each."""
    if not tensors:
        return []
    device = tensors[0].device
    places = torch.arange(1, AT_ONCE + 1, dtype=torch.int64, device=device)
    return torch.stack([_checksum(one, places).to(device) for one in tensors]).tolist()


def _checksum(tensor: Tensor, places: Tensor) -> Tensor:
    """(2,) int64; what overflows is cut, which is arithmetic modulo 2^64."""
    spelled = tensor.detach().reshape(-1).view(SPELLED[tensor.element_size()])
    places = places.to(spelled.device)
    plain, weighted = torch.zeros(2, dtype=torch.int64, device=spelled.device).unbind()
    for part in torch.split(spelled, AT_ONCE):
        whole = part.to(torch.int64)
        plain = plain * ODD + whole.sum()
        weighted = weighted * ODD + (whole * places[: len(whole)]).sum()
    return torch.stack((plain, weighted))
