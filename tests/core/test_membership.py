"""Batch systems say which process of a job this one is."""

import pytest

from rollmill.core.membership import TOKEN, own_address, read_membership
from wordings import raises

SECRET = {TOKEN: "0123456789abcdef"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (BY_HAND, (1, 3, "tcp:127.0.0.1:29500")),
        ({**BY_HAND, "MASTER_PORT": "7000"}, (1, 3, "tcp:127.0.0.1:7000")),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "127.0.0.[1-2,7],x"},
            (0, 2, "tcp:127.0.0.1:29500"),
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost,x", **BY_HAND},
            (1, 3, "tcp:127.0.0.1:29500"),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "5", "MASTER_ADDR": "localhost"},
            (4, 5, "tcp:127.0.0.1:29500"),
        ),
    ],
)
def test_the_place_of_a_process(variables, expected):
    member = read_membership({**SECRET, **variables})
    assert (member.rank, member.count, member.address.replace("::1", "127.0.0.1")) == expected
    assert len(member.token) == 32


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        (SECRET, "cluster-no-variable-says-process"),
        ({**SECRET, "RANK": "0", "WORLD_SIZE": "2"}, "cluster-no-variable-says-where"),
        ({**SECRET, **BY_HAND, "RANK": "3"}, "with-rank-is-from-0"),
        ({**SECRET, **BY_HAND, "RANK": "-1"}, "with-rank-is-from-0"),
        ({**SECRET, **BY_HAND, "MASTER_PORT": "x"}, "master-port-must-be-port"),
        (BY_HAND, "cluster-needs-secret-characters-or"),
        ({**BY_HAND, TOKEN: "short"}, "cluster-needs-secret-characters-or"),
        ({**SECRET, **BY_HAND, "MASTER_ADDR": "no.such.host.invalid"}, "cluster-host-with-rank-0"),
    ],
)
def test_what_is_missing_is_said(variables, code):
    with raises(code):
        read_membership(variables)


def test_own_address():
    assert own_address("127.0.0.1") == "127.0.0.1"
