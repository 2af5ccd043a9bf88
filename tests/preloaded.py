"""Imported by the server in ranks.py before it forks: what each rank would else import, and probe, once it runs."""

from importlib import import_module

for name in (
    "pretrain.train",
    "pretrain.optimizer",
    "torch._dynamo",
    "torch._subclasses.schema_check_mode",
    "torch.utils.serialization.config",
    "torch.utils.tensorboard",
    "numpy.ctypeslib",
    "numpy.ma",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.moe.ep_repack",
    "deepspeed.ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
):
    import_module(name)

# DeepSpeed runs a compiler to learn which of its kernels it could build, and keeps the answers.
import_module("deepspeed.ops").__compatible_ops__  # noqa: B018
