"""Everything that touches DeepSpeed, and nothing else in this package does. What it is told: see resolve.py.

DeepSpeed and torch are imported inside the functions that need them, so that commands answer at once.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pretrain.config import Compute, RunConfig
from pretrain.one_rank import leave_out_reductions
from pretrain.resolve import zero_stage

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from model.loss import LossSum
    from model.transformer import Transformer
    from pretrain.elastic import Layout, Places
    from pretrain.muon import Matrix
    from pretrain.runtime import Ranks
    from pretrain.snapshot import Snapshot

# By name, what writes a file of a checkpoint to a path.
Files: TypeAlias = dict[str, Callable[[Path], None]]
Gate: TypeAlias = Callable[[float], bool]

# How long a rank waits for the others. The longest it waits for nothing bad is what the first does alone: it verifies
# the checkpoint that the run goes on from.
TIMEOUT_MINUTES = 10.0


def device_refusal(compute: Compute) -> str | None:
    """Why this process's device cannot train in `compute`, as DeepSpeed's accelerator has it; None where it can."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if compute != "fp16" or accelerator.is_fp16_supported():
        return None
    on_cpu = accelerator.device_name() == "cpu"
    device, instead = ("this CPU", "bf16") if on_cpu else ("this GPU (compute capability below 7.0)", "fp32")
    return (
        f"{device} cannot train in fp16: DeepSpeed finds no arithmetic for it: "
        f'set precision.compute = "{instead}", or use a GPU that has it'
    )


@contextmanager
def process_group(device: torch.device, timeout_minutes: float = TIMEOUT_MINUTES) -> Iterator[None]:
    """A process group over the ranks that the launcher's variables describe: NCCL on GPUs, gloo on CPUs.

    Who waits for another rank longer than `timeout_minutes`, to meet or in a collective, raises.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found nothing better
    import deepspeed
    import torch.distributed as dist

    timeout = timedelta(minutes=timeout_minutes)
    # DeepSpeed clones the group for its own collectives, and what it doesn't say is torch's: 30 minutes with gloo.
    defaults: Any = dist.distributed_c10d
    defaults.default_pg_timeout = defaults.default_pg_nccl_timeout = timeout
    # An operation for inference on CPUs, which DeepSpeed would otherwise compile here: a compiler needed for nothing.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed 0.19 calls collectives by names that torch 2.13 has begun to rename.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    backend = "nccl" if device.type == "cuda" else "gloo"
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        socket.getaddrinfo(os.environ["MASTER_ADDR"], None)
        deepspeed.init_distributed(dist_backend=backend, timeout=timeout, auto_mpi_discovery=False, verbose=False)
    except (dist.DistError, OSError) as error:
        raise OSError(f"the ranks cannot meet at MASTER_ADDR:MASTER_PORT = {address}: {error}") from None
    try:
        yield
    finally:
        dist.destroy_process_group()


class TrainingEngine:
    """The DeepSpeed engine, reduced to what the loop asks of it. Every method is called on all ranks together."""

    def __init__(
        self, model: Transformer, config: RunConfig, resolved: Mapping[str, Any], ranks: Ranks, device: torch.device
    ) -> None:
        """`model` in fp32, equal on all ranks; DeepSpeed casts it to the compute dtype and takes its master copy."""
        import deepspeed
        import torch
        from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

        from pretrain.muon import OrthogonalizingAdamW
        from pretrain.optimizer import build_optimizer

        self.model_config = model.config
        self.ranks = ranks
        self.device = device
        self.zero_stage = zero_stage(resolved)
        in_fp16, in_bf16 = bool(resolved["fp16"]["enabled"]), bool(resolved["bf16"]["enabled"])
        self._unpartitioned = self.zero_stage == 0 and not in_fp16 and not in_bf16
        self._measured_norm = 0.0
        self._loss_scale_window = config.precision.loss_scale_window if in_fp16 else None
        self.loss_scale: float | None = None
        self.overflowed = False
        self.held = False
        self._allows: Gate | None = None  # while DeepSpeed steps
        dtype = torch.float16 if in_fp16 else torch.bfloat16 if in_bf16 else torch.float32
        for parameter in model.parameters():  # as DeepSpeed would, but before the device holds them in fp32
            parameter.data = parameter.data.to(dtype)
        model.to(device)
        # ZeRO-0 in bf16 takes a step on zero gradients to make its state: at rate 0 that decays no weight, and with the
        # state cleared, AdamW's step count begins at 1 (else the first update is a quarter too small).
        optimizer = build_optimizer(model, config, initial_lr=0.0, rank=ranks.rank, world_size=ranks.world_size)
        optimizer.step = self._gated(optimizer.step)  # type: ignore[method-assign]
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._sizes = {names[p]: p.numel() for group in optimizer.param_groups for p in group["params"]}
        # Of an optimizer that it has not tested DeepSpeed warns; ours are, in tests/pretrain/test_optimizer.py.
        ZERO_SUPPORTED_OPTIMIZERS.append(type(optimizer))
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=dict(resolved), dist_init_required=False
        )
        if ranks.world_size == 1:
            leave_out_reductions(self._engine)
        if self.zero_stage == 0:
            optimizer.state.clear()
        elif isinstance(optimizer, OrthogonalizingAdamW):
            optimizer.layouts.update(self._matrix_layouts(optimizer))
        if in_fp16:
            # At the smallest scale DeepSpeed would raise a bare Exception; `metrics.Report` says it better.
            self._engine.optimizer.loss_scaler.raise_error_at_min_scale = False
        self._collector = _Collector()
        storage = self._engine.checkpoint_engine
        storage.load, storage.save, storage.makedirs = _load_tensors, self._collector.save, _make_no_folder
        self._engine._copy_recovery_script = self._collector.copy_scripts

    def _matrix_layouts(self, optimizer: torch.optim.Optimizer) -> dict[Tensor, list[Matrix]]:
        """Where the hidden matrices lie in the flat partitions that DeepSpeed made of them, from its own tables."""
        from pretrain.muon import cut, spread

        marked = [number for number, group in enumerate(optimizer.param_groups) if group.get("hidden")]
        zero, world_size = self._engine.optimizer, self.ranks.world_size
        if self.zero_stage == 3:
            return {
                flat: spread([tuple(parameter.ds_shape) for parameter in zero.fp16_groups[number]], world_size)
                for number, flat in enumerate(zero.fp32_partitioned_groups_flat)
                if zero.sub_group_to_group_id[number] in marked
            }
        layouts = {}
        for number in marked:
            if hasattr(zero, "bf16_groups"):  # the ZeRO-1 engine of bf16 with fp32 accumulation
                flat, parameters = zero.fp32_groups_flat_partition[number], zero.bf16_groups[number]
                offsets = [0, *itertools.accumulate(parameter.numel() for parameter in parameters)][:-1]
            else:
                flat, parameters = zero.single_partition_of_fp32_groups[number], zero.round_robin_bit16_groups[number]
                offsets = zero.round_robin_bit16_offsets[number]
            layouts[flat] = cut([tuple(parameter.shape) for parameter in parameters], offsets, flat.numel())
        return layouts

    def forward(
        self, inputs: NDArray[np.int64], targets: NDArray[np.int64], documents: NDArray[np.int64] | None = None
    ) -> LossSum:
        """Loss sums (nats, fp32) and token count of a micro-batch, each array (micro_batch_size, seq_len).

        Where `documents` numbers them, attention and positions stay within documents.
        """
        loss: LossSum = self._engine(*self._on_device(inputs, targets), **self._masked(documents))
        return loss

    def forward_only(
        self, inputs: NDArray[np.int64], targets: NDArray[np.int64], documents: NDArray[np.int64] | None = None
    ) -> LossSum:
        """`forward` for evaluation: no gradients, and DeepSpeed's counters of micro-steps stay as they are."""
        import torch

        with torch.no_grad():
            loss: LossSum = self._engine.module(*self._on_device(inputs, targets), **self._masked(documents))
        return loss

    def _on_device(self, *arrays: NDArray[np.int64]) -> list[Tensor]:
        import torch

        return [torch.from_numpy(array).to(self.device, non_blocking=True) for array in arrays]

    def _masked(self, documents: NDArray[np.int64] | None) -> dict[str, Tensor]:
        return {} if documents is None else {"documents_bt": self._on_device(documents)[0]}

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def step(self, allows: Gate | None = None) -> None:
        """End a micro-step; the last one of an accumulation clips the gradient and updates the weights.

        Where an element of the gradient is not finite, it leaves them as they are: `overflowed` then says so, and
        `skipped_steps` counts it. `loss_scale` is the scale of that gradient, None where it has none (bf16, fp32).
        `allows` is asked whether to update, with the gradient's norm, the same on all ranks: where it says no, weights,
        moments and the optimizer's count of steps stay, bit for bit, and `held` says so.
        """
        updates = self._engine.is_gradient_accumulation_boundary()
        if self._unpartitioned and updates:
            # DeepSpeed measures no norm here unless it clips; behind the last backward the gradients are reduced.
            import torch

            gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
            self._measured_norm = float(torch.nn.utils.get_total_norm(gradients))
        skipped_before = self.skipped_steps
        if self._loss_scale_window is not None:
            self.loss_scale = float(self._engine.optimizer.loss_scaler.cur_scale)
        self.held, self._allows = False, allows
        self._engine.step()
        self._allows = None
        if updates:
            self.overflowed = self.skipped_steps > skipped_before
            if self.overflowed:
                self._forget_gradient()
            self._grow_loss_scale()

    def _gated(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """An optimizer's `step` that `allows` can hold still. DeepSpeed calls it once a partition, the norm known."""

        def gated(*arguments: Any, **settings: Any) -> Any:
            if self._allows is not None:
                norm = self._measured_norm if self._unpartitioned else float(self._engine.optimizer._global_grad_norm)
                self.held, self._allows = not self._allows(norm), None
            return None if self.held else step(*arguments, **settings)

        return gated

    def _forget_gradient(self) -> None:
        """Let go of a gradient that overflowed: ZeRO-1 and 2 that offload would add all later ones to its fp32 sums."""
        zero = self._engine.optimizer
        if getattr(zero, "cpu_offload", False):
            zero.averaged_gradients.update(dict.fromkeys(zero.averaged_gradients))

    def _grow_loss_scale(self) -> None:
        if self._loss_scale_window is None:
            return
        scaler = self._engine.optimizer.loss_scaler  # in DeepSpeed's checkpoints with its counts
        updates = scaler.cur_iter - scaler.last_overflow_iter - 1  # since the last overflow
        if updates > 0 and updates % self._loss_scale_window == 0:
            scaler.cur_scale *= 2.0

    def drop_accumulation(self) -> None:
        """Forget the micro-steps since the last update, gradients and counts, as if they had not been."""
        zero = self._engine.optimizer
        zero.zero_grad()  # under ZeRO-3 the count of micro-steps too
        self._engine.micro_steps = 0
        for sums in ("averaged_gradients", "all_grad_tensors"):
            if hasattr(zero, sums):
                getattr(zero, sums).update(dict.fromkeys(getattr(zero, sums)))
        if self.zero_stage in (1, 2) and hasattr(zero, "micro_step_id"):
            zero.micro_step_id = -1  # of the micro-step before the first

    def set_global_batch_size(self, sequences: int) -> None:
        """The global batch of the next step, between two steps: the micro-batch stays, the accumulation follows."""
        if sequences != self._engine.train_batch_size():
            self._engine.set_train_batch_size(sequences)
            self._engine.micro_steps = 0  # a step ends at its multiples of the accumulation: they begin anew

    @property
    def learning_rate(self) -> float:
        """The rate of the last step, behind `load` too."""
        return float(self._engine.optimizer.param_groups[0]["lr"])

    def set_learning_rate(self, lr: float) -> None:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr

    def gradient_norm(self) -> float:
        """The norm of the last update's whole gradient, before clipping; not finite where it overflowed."""
        return self._measured_norm if self._unpartitioned else float(self._engine.get_global_grad_norm())

    @property
    def skipped_steps(self) -> int:
        """Updates that DeepSpeed left out because a gradient overflowed."""
        return int(self._engine.skipped_steps)

    def sum_over_ranks(self, *values: Tensor | float) -> list[float]:
        """Each value summed over all ranks, in float64; one collective for all of them."""
        import torch

        parts = [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in values]
        summed: list[float] = self.ranks.sum(torch.stack(parts)).tolist()
        return summed

    def is_finite(self) -> bool:
        """Whether every weight, master and moment that the ranks hold is finite, and so each tensor's norm in fp32.

        Numbers whose squares overflow are no better than infinite ones: with them no norm is finite, nor a gradient's.
        """
        import torch

        optimizer = getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)
        # Under ZeRO-3 a parameter is empty, and its rank's share is in `ds_tensor`; masters are keys of the state.
        held = [getattr(parameter, "ds_tensor", parameter) for parameter in self._engine.module.parameters()]
        for master, state in optimizer.state.items():
            held += [master, *(value for value in state.values() if isinstance(value, torch.Tensor))]
        # Those of bf16 are summed in fp32 too and may stay in bf16, of the same range: on CPUs twenty times as quick.
        norms = [
            torch.linalg.vector_norm(tensor.detach(), dtype=None if tensor.dtype == torch.bfloat16 else torch.float32)
            for tensor in held
            if tensor.is_floating_point()
        ]
        (infinite,) = self.sum_over_ranks(sum(not bool(norm.isfinite()) for norm in norms))
        return infinite == 0

    def save(self, folder: Path) -> None:
        """Write DeepSpeed's own files of all ranks below `folder`, and its scripts beside it."""
        for name, write in self.files(folder=folder.name).items():
            (folder.parent / name).parent.mkdir(parents=True, exist_ok=True)
            write(folder.parent / name)
        self.ranks.barrier()

    def files(self, snapshot: Snapshot | None = None, folder: str = "engine") -> Files:
        """DeepSpeed's own files of this rank, below `folder`, and its scripts. Nothing is written here.

        They have the numbers of now where a `snapshot` copies them; else those of when they are written.
        """
        collector = self._collector
        collector.files, collector.snapshot = {}, snapshot
        self._engine.save_checkpoint(".", tag=folder, save_latest=False)
        files, collector.files, collector.snapshot = collector.files, {}, None
        return files

    def load(self, folder: Path) -> Layout | None:
        """Read what `save` wrote. Where that lies otherwise here (other ranks, another stage), it is spread anew, and
        the layout of the files is returned.

        Weight decay, betas, eps and the kernel stay those of this run, though the files have them too.
        pickle.UnpicklingError where a file holds anything but tensors, numbers and a few classes of DeepSpeed's.
        """
        from pretrain.elastic import saved_layout

        with _safe_classes():
            saved = saved_layout(folder, _map_tensors, self._sizes)
            if saved != self.layout():
                self._load_otherwise(folder, saved)
                return saved
            self._load_same(folder)
        return None

    def lies_otherwise(self, folder: Path) -> bool:
        """Whether `load` would spread anew what `save` wrote there, and so reads the files of all ranks."""
        from pretrain.elastic import saved_layout

        with _safe_classes():
            return saved_layout(folder, _map_tensors, self._sizes) != self.layout()

    def _load_same(self, folder: Path) -> None:
        names = {"weight_decay", "betas", "eps", "fused"}
        groups = self._engine.optimizer.param_groups
        settings = [{name: group[name] for name in names & group.keys()} for group in groups]
        loaded, _ = self._engine.load_checkpoint(str(folder.parent), tag=folder.name)
        if loaded is None:
            raise RuntimeError(f"DeepSpeed loaded nothing from {folder}")
        for group, ours in zip(self._engine.optimizer.param_groups, settings, strict=True):
            group.update(ours)

    def layout(self) -> Layout:
        """How masters and states are spread over the ranks here."""
        from pretrain.elastic import Layout, partitions_of

        whole = tuple(((name, size),) for name, size in self._sizes.items())
        partitions = whole if self.zero_stage == 0 else partitions_of(self._engine._get_zero_param_shapes())
        return Layout(self.zero_stage, self.ranks.world_size, partitions, bool(self._engine.zero_parameter_alignment()))

    def _load_otherwise(self, folder: Path, saved: Layout) -> None:
        """Fill masters and states, then what DeepSpeed derives from them, then its counts."""
        from pretrain.elastic import SCALER, SavedState, fill, model_file

        state = SavedState(folder, saved, _map_tensors)
        zero = self._engine.optimizer
        optimizer = getattr(zero, "optimizer", zero)
        if self.zero_stage == 3:
            zero.checkpoint_event_prologue()
        held = self._partitions()
        rank = self.ranks.rank if self.zero_stage else 0  # under ZeRO-0 all ranks have the same
        fused = bool(optimizer.defaults.get("fused"))
        for number, where in enumerate(self._places(held)):
            optimizer.state[held[number]] = fill(state, where, rank, held[number], number, fused=fused)
        for name in SCALER:
            if name in state.scaler and hasattr(zero, name):
                setattr(zero, name, state.scaler[name])
        self.set_learning_rate(state.lr)
        if self.zero_stage == 3:
            same = {**{name: getattr(zero, name) for name in SCALER}, "fp32_flat_groups": held}
            zero.load_state_dict({self.ranks.rank: same}, load_optimizer_states=False)
            zero.checkpoint_event_epilogue()
        elif self.zero_stage:
            zero.update_lp_params()
        elif not self._unpartitioned:
            for weight, master in zip(itertools.chain(*zero.fp16_groups), held, strict=True):
                weight.data.copy_(master.data)
        header = _map_tensors(model_file(folder))
        for count in ("global_steps", "global_samples", "skipped_steps"):
            setattr(self._engine, count, header[count])

    @property
    def transformer(self) -> Transformer:
        """The model that is trained; under ZeRO-3 its parameters are empty but in a forward pass."""
        model: Transformer = self._engine.module
        return model

    @property
    def micro_steps(self) -> int:
        """A count that changes with each micro-step. Any thread may ask."""
        return int(self._engine.micro_steps)

    def masters(self) -> list[tuple[str, Tensor]]:
        """Views (n,) of the masters that this rank updates, parameter by parameter: under ZeRO-0 all of them."""
        held = self._partitions()
        rank = self.ranks.rank if self.zero_stage else 0
        return [
            (name, held[number].detach().view(-1)[piece.offset : piece.offset + piece.size])
            for number, where in enumerate(self._places(held))
            for name, pieces in where.items()
            for piece in pieces
            if piece.rank == rank
        ]

    def replicas(self) -> dict[str, Tensor]:
        """What every rank holds between two steps, by name, to be equal on all: under ZeRO-0 weights, masters and
        moments; under 1 and 2 the weights, which each step sends around anew; under 3 the small ones that stay whole.
        """
        held = {
            name: parameter.detach()
            for name, parameter in self._engine.module.named_parameters()
            if getattr(parameter, "ds_persist", True)
        }
        if self.zero_stage:
            return held
        states = getattr(self._engine.optimizer, "optimizer", self._engine.optimizer).state
        for (name, master), of_optimizer in zip(self.masters(), self._partitions(), strict=True):
            if not self._unpartitioned:
                held[f"{name} (master)"] = master
            state = states.get(of_optimizer, {}).items()
            held |= {f"{name} ({key})": value for key, value in state if hasattr(value, "element_size")}
        return held

    def _places(self, held: list[Tensor]) -> list[Places]:
        """Where, in this rank's flat partitions, parameters lie."""
        from pretrain.elastic import places

        own = self.layout()
        gaps = getattr(self._engine.optimizer, "round_robin_bit16_padding", [[0] * len(one) for one in own.partitions])
        return places(own, [weights.numel() for weights in held], gaps)

    def _partitions(self) -> list[Tensor]:
        """This rank's masters: its flat partitions or, under ZeRO-0, one a parameter."""
        zero = self._engine.optimizer
        if self.zero_stage == 0:
            groups = getattr(zero, "optimizer", zero).param_groups
            return [master for group in groups for master in group["params"]]
        if self.zero_stage == 3:
            return list(zero.fp32_partitioned_groups_flat)
        in_bf16 = hasattr(zero, "bf16_groups")  # ZeRO-1 with sums in fp32
        return list(zero.fp32_groups_flat_partition if in_bf16 else zero.single_partition_of_fp32_groups)

    def gather_weights(self, snapshot: Snapshot | None = None) -> dict[str, Tensor]:
        """On the first rank, a copy of all weights on the CPU in the compute dtype, tied ones once; else empty.

        In a `snapshot` that has DeepSpeed's files they take no more room, unless ZeRO-3 has to gather them.
        """
        weights: dict[str, Tensor] = {}
        for name, parameter in self.weights():
            if not self.ranks.is_first:
                continue
            if snapshot is None:
                weights[name] = parameter.detach().to("cpu", copy=True).contiguous()
            elif self.zero_stage == 3:
                weights[name] = snapshot.take_alone(parameter)
            else:
                weights[name] = snapshot.take(parameter.detach())
        return weights

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter by name, whole until the next is asked for: under ZeRO-3 one at a time keeps memory flat."""
        import deepspeed

        for name, parameter in self._engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.zero_stage == 3):
                yield name, parameter

    @property
    def gradient_factor(self) -> float:
        """What makes a micro-step's gradient, as backward gives it, as large as the step's: DeepSpeed has divided it by
        the accumulation steps, and in fp16 multiplied it by the loss scale."""
        scale = 1.0 if self._loss_scale_window is None else float(self._engine.optimizer.loss_scaler.cur_scale)
        return float(self._engine.gradient_accumulation_steps()) / scale


class _Collector:
    """Takes what DeepSpeed would write to a disk, so that it can be written elsewhere, and later."""

    def __init__(self) -> None:
        self.files: Files = {}
        self.snapshot: Snapshot | None = None

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        import torch

        kept = state_dict if self.snapshot is None else self.snapshot.take(state_dict)
        self.files[os.path.normpath(path)] = partial(torch.save, kept)

    def copy_scripts(self, folder: str) -> None:
        """Those that DeepSpeed puts beside its files."""
        import deepspeed

        for name in ("zero_to_fp32.py", "zero_to_torch.py"):
            self.files[name] = partial(_copy_script, Path(deepspeed.__file__).parent / "utils" / name)


def _make_no_folder(path: str, exist_ok: bool = False) -> None:
    """Whoever writes a file makes its folder."""


def _copy_script(source: Path, path: Path) -> None:
    """Executable, as DeepSpeed has it."""
    shutil.copyfile(source, path)
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


def _safe_classes() -> AbstractContextManager[None]:
    """DeepSpeed would unpickle whatever stands in a file. These classes of its own are all that its files need."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
    from torch.serialization import safe_globals

    context: AbstractContextManager[None] = safe_globals(
        [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    )
    return context


def _load_tensors(path: str, map_location: Any = None) -> Any:
    """What DeepSpeed's checkpoint engine does with a file of a checkpoint, without running anything that is in it."""
    import torch

    return torch.load(path, map_location=map_location, weights_only=True)


def _map_tensors(path: Path) -> Any:
    """A file of a checkpoint, without running anything that is in it; tensors are read from it where they are used."""
    import torch

    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
