"""What DeepSpeed does for the sake of other ranks, left out where there are none.

Under ZeRO-2 it copies each gradient into a bucket, divides it by 1, makes one piece of the bucket, casts that, sums it
over one rank, copies it back, and adds it to the gradients so far: for `mini` on a CPU this took several times as long
as AdamW itself (docs/performance.md). Here a gradient is added at once, or stays where backward has left it. The
numbers are the same, bit for bit (tests/pretrain/test_one_rank.py): only divisions by 1 and sums of one are left out.
"""

from __future__ import annotations

from typing import Any


def leave_out_reductions(engine: Any) -> None:
    """Of a DeepSpeed engine with ZeRO-0, 1 or 2 whose process group has one rank. ZeRO-3 and offloading stay."""
    zero = engine.optimizer
    if engine.zero_optimization_partition_weights() or getattr(zero, "cpu_offload", False):
        return
    if not hasattr(zero, "reduce_independent_p_g_buckets_and_remove_grads"):  # ZeRO-0, and ZeRO-1 of bf16_optimizer.py
        engine.enable_backward_allreduce = False
        return

    def keep(parameter: Any, group: int) -> None:
        """Called when a gradient is whole. Sums in the gradient's own dtype are made from `parameter.grad` later."""
        number = zero.get_param_id(parameter)
        sums = zero._get_compact_grad_partition_slice(group, 0, number, parameter.numel())
        if sums is not None:
            sums.add_(zero.get_gradient_for_reduction(parameter).view(-1))
            zero.clear_grad_attribute(parameter)

    zero.reduce_independent_p_g_buckets_and_remove_grads = keep
    zero.reduce_bucket_size = 1  # element of its buffer; it divides by that
    zero.overlap_comm = False  # else it waits for a GPU at the end of each backward
