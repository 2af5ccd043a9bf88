"""Host files as DeepSpeed reads them."""

from __future__ import annotations

import pytest

from launch.errors import LaunchError
from launch.hosts import Host, read_hostfile


def test_what_we_read_is_what_deepspeed_reads(tmp_path):
    from deepspeed.launcher.runner import fetch_hostfile

    path = tmp_path / "hosts"
    path.write_text("# two servers\nnode-1   slots=8\n\n  me@node-2.example slots=4 # the old one\n")
    assert read_hostfile(path) == (Host("node-1", 8), Host("me@node-2.example", 4))
    assert {host.name: host.slots for host in read_hostfile(path)} == fetch_hostfile(str(path))


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "names no host"),
        (b"# nothing\n\n", "names no host"),
        (b"a slots=1\nb\n", "line 2: 'b' must be `NAME slots=N`"),
        (b"a slots=0\n", "line 1"),
        (b"a slots=-1\n", "line 1"),
        (b"a slots=two\n", "line 1"),
        (b"a slots=10000\n", "N of 1 to 9999"),
        (b"a slots=" + b"9" * 5_000 + b"\n", "9…' must be `NAME slots=N`"),
        (b"a slots=2 max_slots=4\n", "line 1"),
        (b"node-[1-9] slots=2\n", "line 1"),
        (b"-oProxyCommand=x slots=2\n", "line 1"),
        (b"a,b slots=2\n", "line 1"),
        (b"a slots=2\nb slots=2\na slots=2\n", "line 3: a stands there twice"),
        (b"\xff\xfe\x00", "not a text file"),
        (None, "No such file"),
    ],
)
def test_anything_else_is_one_line_with_file_and_number(tmp_path, content, says):
    path = tmp_path / "hosts"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LaunchError) as caught:
        read_hostfile(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
