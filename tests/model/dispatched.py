"""What torch is asked to do, seen from below: the bytes of all storages that live, and how often it multiplies."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside it, every storage that an operation makes counts until it is freed; what existed before does not.

    Exact for any device, so the "meta" device measures shapes that no machine here could hold. Temporaries inside one
    operation's kernel are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def outside(self, *tensors: Tensor) -> LiveBytes:
        """Count these not, though operations give them back (parameters, inputs)."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


class Products(TorchDispatchMode):
    """Inside it, matrix products and attentions, forward and backward, are counted by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def costly(self) -> int:
        return sum(self.counts.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm") or "dot_product" in name:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
