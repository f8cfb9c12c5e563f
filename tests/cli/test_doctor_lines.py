"""Single lines of `rollmill doctor`."""

from rollmill.cli.doctor import _device


def test_a_cpu_has_the_memory_of_the_machine():
    cpu = {"platform": "cpu", "kind": "cpu", "memory_bytes": None}
    assert _device(cpu) == "  cpu, which uses the machine's main memory"
    gpu = {"platform": "cuda", "kind": "NVIDIA H200", "memory_bytes": 3 * 2**30}
    assert _device(gpu).split() == ["cuda", "NVIDIA", "H200,", "3.0", "GiB"]
