"""What a rank may use, read from trees like those of Linux in /proc and /sys."""

from __future__ import annotations

import os

import pytest
import torch

from pretrain.config import RecipeError
from pretrain.device_memory import GB, gpu_memory, host_memory, host_share, ranks_here, show_size, this_device

MEMINFO = "MemTotal: 32000000 kB\nMemFree: 100 kB\nMemAvailable: 20000000 kB\n"
KB = 1024


@pytest.fixture
def tree(tmp_path):
    def write(files):
        for name, text in {"proc/meminfo": MEMINFO, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


def test_a_machine_without_control_groups(tree):
    host = host_memory(tree({}))
    assert (host.total_bytes, host.available_bytes) == (32_000_000 * KB, 20_000_000 * KB)


@pytest.mark.parametrize(
    "files, total, available",
    [
        # version 2, the limit two levels above the process; half of what is used is cache that would be reclaimed
        (
            {
                "proc/self/cgroup": "0::/slurm/job/step\n",
                "sys/fs/cgroup/slurm/job/step/memory.max": "max\n",
                "sys/fs/cgroup/slurm/memory.max": f"{8 * GB}\n",
                "sys/fs/cgroup/slurm/memory.current": f"{4 * GB}\n",
                "sys/fs/cgroup/slurm/memory.stat": f"anon {2 * GB}\ninactive_file {2 * GB}\n",
            },
            8 * GB,
            6 * GB,
        ),
        # version 1 in a container that sees its own group as the root
        (
            {
                "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu:/\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{9 * GB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{1 * GB}\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
            },
            9 * GB,
            8 * GB,
        ),
        # version 1 unlimited is a huge number
        (
            {
                "proc/self/cgroup": "4:memory:/a\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n",
            },
            32_000_000 * KB,
            20_000_000 * KB,
        ),
        # lines of another form say nothing
        ({"proc/self/cgroup": "\nmemory\n4:memory\n"}, 32_000_000 * KB, 20_000_000 * KB),
        # used up: nothing is left, never less than nothing
        (
            {
                "proc/self/cgroup": "0::/a\n",
                "sys/fs/cgroup/a/memory.max": f"{2 * GB}\n",
                "sys/fs/cgroup/a/memory.current": f"{3 * GB}\n",
            },
            2 * GB,
            0,
        ),
    ],
)
def test_control_groups_limit_at_every_level(tree, files, total, available):
    host = host_memory(tree(files))
    assert (host.total_bytes, host.available_bytes) == (total, available)


def test_ranks_share_what_is_available_and_agree_where_they_ask_at_once(tree):
    root = tree({"proc/self/status": "VmRSS: 1000000 kB\n"})
    asked = host_share(2, alone=True, root=root)
    assert asked.total_bytes == 21_000_000 * KB // 2  # what this process holds is not lost to it
    assert (asked.kind, asked.occupied) == ("cpu", True)
    assert asked.source == "2 ranks share 21.50 GB available now of 32.77 GB"
    for available in (1_000_000, 20_000_000):
        root = tree({"proc/meminfo": MEMINFO.replace("20000000", str(available))})
        assert host_share(2, alone=False, root=root).total_bytes == 32_000_000 * KB // 2
    assert host_share(1, alone=False, root=root).source == "32.77 GB of this machine"


def test_a_limit_says_that_it_is_one(tree):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": str(8 * GB)}
    assert host_share(1, alone=False, root=tree(files)).source == "8.00 GB that its control group allows"


def test_a_system_without_proc_says_what_it_has_physically(tmp_path):
    host = host_memory(tmp_path)
    assert host.total_bytes == host.available_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_the_launcher_says_how_many_ranks_are_here():
    assert ranks_here({}, 8) == 8
    assert ranks_here({"LOCAL_SIZE": "4"}, 8) == 4  # DeepSpeed's
    assert ranks_here({"LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "4"}, 8) == 2  # torchrun's
    for strange in ("", "0", "many", "9"):
        assert ranks_here({"LOCAL_WORLD_SIZE": strange}, 8) == 8


def test_this_machine_has_something():
    here = this_device(1, "cpu")
    assert here.kind == "cpu"
    assert 0 < here.total_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert here.host_bytes == here.total_bytes


def test_a_gpu_that_others_use_is_what_they_leave(monkeypatch):
    """The driver's answers are given here; this process's own context is not counted against it."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU of the test {index}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (79 * GB + GB // 2, 80 * GB))
    whole = gpu_memory(3, 2)
    assert (whole.kind, whole.total_bytes, whole.source, whole.occupied) == (
        "cuda",
        80 * GB,
        "GPU of the test 3",
        False,
    )
    assert whole.host_bytes == host_share(2, alone=False).total_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 * GB, 80 * GB))
    left = gpu_memory(0, 2)
    assert (left.total_bytes, left.occupied) == (11 * GB, True)
    assert left.source == "free of the 80.00 GB of GPU of the test 0"

    def refuse(index):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    with pytest.raises(RecipeError, match=r"GPU 5 does not say what memory it has \(CUDA error: out of memory\)"):
        gpu_memory(5, 8)


def test_sizes_for_people():
    assert [show_size(size) for size in (24 * GB, 1.5 * GB, 994_000_000, 996_000_000)] == [
        "24.00 GB", "1.50 GB", "994 MB", "1.00 GB",
    ]  # fmt: skip
