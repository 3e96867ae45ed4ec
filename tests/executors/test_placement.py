"""Made-up inventories: who finds room, and in which order."""

import pytest

from ratchet.errors import ConfigError
from ratchet.executors.devices import find_accelerators, find_node, parse_topology
from ratchet.executors.placement import (
    Accelerator,
    ClusterNode,
    ResourceManager,
    ResourceRequest,
    VirtualCluster,
)


def node(name, gpus=0, cpus=8.0):
    return ClusterNode(
        name, cpus, tuple(Accelerator(i) for i in (range(gpus) if isinstance(gpus, int) else gpus))
    )


def laid(nodes, *needs, strategy="pack"):
    """{role: its bundles by rank, as (node, "indices")}"""
    cluster = VirtualCluster(ResourceManager(nodes, strategy))
    cluster.plan(needs)
    return {
        need.role: [(b.node, b.visible_devices) for b in cluster.bundles(need.role)]
        for need in needs
    }


A4, B4 = node("a", 4), node("b", 4)
ROOM = [
    # one node, packed
    ([A4], [ResourceRequest("learner", 4, gpus=1)], "pack", {"learner": [("a", "0"), ("a", "1"), ("a", "2"), ("a", "3")]}),
    # a rank's own accelerators lie side by side
    ([A4], [ResourceRequest("generator", 2, gpus=2)], "pack", {"generator": [("a", "0,1"), ("a", "2,3")]}),
    # disaggregated roles never share
    ([A4, B4], [ResourceRequest("learner", 4, gpus=1), ResourceRequest("generator", 2, gpus=2)], "pack",
     {"learner": [("a", "0"), ("a", "1"), ("a", "2"), ("a", "3")], "generator": [("b", "0,1"), ("b", "2,3")]}),
    # the fullest node that has room for all
    ([A4, node("c", 2)], [ResourceRequest("critic", 2, gpus=1)], "pack", {"critic": [("c", "0"), ("c", "1")]}),
    # more than any node has: the emptiest first, ranks in the order of nodes
    ([node("c", 2), A4], [ResourceRequest("learner", 5, gpus=1)], "pack",
     {"learner": [("c", "0"), ("a", "0"), ("a", "1"), ("a", "2"), ("a", "3")]}),
    ([A4, B4], [ResourceRequest("learner", 4, gpus=1)], "spread", {"learner": [("a", "0"), ("a", "1"), ("b", "0"), ("b", "1")]}),
    ([A4, B4], [ResourceRequest("learner", 2, gpus=1)], "per_node", {"learner": [("a", "0"), ("b", "0")]}),
    # colocated: the same devices, dealt out anew
    ([A4, B4], [ResourceRequest("generator", 2, gpus=4, colocated_with="learner"), ResourceRequest("learner", 8, gpus=1)], "pack",
     {"learner": [(n, str(i)) for n in "ab" for i in range(4)], "generator": [("a", "0,1,2,3"), ("b", "0,1,2,3")]}),
    # colocated, and larger than the partner: the partner's devices first, then free ones
    ([A4, B4], [ResourceRequest("generator", 3, gpus=2, colocated_with="learner"), ResourceRequest("learner", 3, gpus=1)], "pack",
     {"learner": [("a", "0"), ("a", "1"), ("a", "2")], "generator": [("a", "0,1"), ("b", "0,1"), ("b", "2,3")]}),
    # devices that are not in a row
    ([node("a", (1, 3, 6))], [ResourceRequest("learner", 2, gpus=1)], "pack", {"learner": [("a", "1"), ("a", "3")]}),
    # the accelerator that a role needs, whichever is the nearest
    ([A4], [ResourceRequest("driver", 1, gpus=1, accelerator=2), ResourceRequest("generator", 2, gpus=1)], "pack",
     {"driver": [("a", "2")], "generator": [("a", "0"), ("a", "1")]}),
    # no accelerators
    ([node("a")], [ResourceRequest("learner", 2), ResourceRequest("reward", 1)], "pack", {"learner": [("a", "")] * 2, "reward": [("a", "")]}),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "needs", "strategy", "expected"), ROOM)
def test_who_gets_what(nodes, needs, strategy, expected):
    assert laid(nodes, *needs, strategy=strategy) == expected


TOO_MUCH = [
    (
        [A4],
        [ResourceRequest("learner", 5, gpus=1)],
        ["learner", "5 x 1 accelerator", "4 of 5", "a (4 accelerators, 8 cores)"],
    ),
    (
        [A4],
        [ResourceRequest("learner", 2, gpus=1), ResourceRequest("generator", 2, gpus=2)],
        ["generator", "2 x 2 accelerators", "1 of 2"],
    ),
    ([node("a", 0, 2)], [ResourceRequest("reward", 3, cpus=1)], ["3 x 1 cores", "2 of 3"]),
    # a rank never spans nodes
    ([A4, B4], [ResourceRequest("learner", 1, gpus=8)], ["1 x 8 accelerators", "0 of 1"]),
    ([A4, B4], [ResourceRequest("learner", 3, gpus=1, strategy="per_node")], ["2 of 3"]),
    (
        [A4],
        [
            ResourceRequest("learner", 2, gpus=1),
            ResourceRequest("g", 1, gpus=4, colocated_with="learner"),
        ],
        ["1 x 4 accelerators colocated with learner", "0 of 1"],
    ),
    ([], [ResourceRequest("learner", 1)], ["0 of 1", "no node"]),
]


@pytest.mark.parametrize(("nodes", "needs", "says"), TOO_MUCH)
def test_what_is_missing_is_named(nodes, needs, says):
    with pytest.raises(ConfigError) as caught:
        ResourceManager(nodes).check(needs)
    for part in ("too few resources", *says):
        assert part in str(caught.value)


def test_plans_that_make_no_sense():
    with pytest.raises(ConfigError, match="colocated with 'learner', which has no accelerators"):
        ResourceManager([A4]).check(
            [ResourceRequest("generator", 1, gpus=1, colocated_with="learner")]
        )
    with pytest.raises(ConfigError, match="two roles are called 'learner'"):
        ResourceManager([A4]).check([ResourceRequest("learner", 1), ResourceRequest("learner", 1)])


def test_cores_that_nobody_asked_for_are_shared():
    cluster = VirtualCluster(ResourceManager([node("a", 0, 8)]))
    cluster.plan(
        [
            ResourceRequest("learner", 2),
            ResourceRequest("reward", 1, cpus=2),
            ResourceRequest("critic", 1, colocated_with="learner"),
        ]
    )
    assert [b.threads for b in cluster.bundles("learner")] == [3, 3]
    assert [b.threads for b in cluster.bundles("reward")] == [2]
    assert [b.threads for b in cluster.bundles("critic")] == [3]
    cluster.plan([ResourceRequest("learner", 16)])
    assert {b.threads for b in cluster.bundles("learner")} == {1}


def test_fractional_cores():
    cluster = VirtualCluster(ResourceManager([node("a", 0, 1)]))
    cluster.plan([ResourceRequest("reward", 4, cpus=0.25)])
    assert [b.cpus for b in cluster.bundles("reward")] == [0.25] * 4


# NVLink joins 0 with 2 and 1 with 3; memory is near to 0, 2 and 1, 3.
PAIRS = (
    "\t".join(["", "GPU0", "GPU1", "GPU2", "GPU3", "CPU Affinity", "NUMA Affinity"])
    + """
GPU0\t X \tSYS\tNV4\tSYS\t0-7\t0
GPU1\tSYS\t X \tSYS\tNV4\t8-15\t1
GPU2\tNV4\tSYS\t X \tSYS\t0-7\t0
GPU3\tSYS\tNV4\tSYS\t X \t8-15\t1

Legend:
"""
)


def test_neighbours_are_taken_together():
    near = parse_topology(PAIRS)
    assert near[2] == Accelerator(2, numa=0, island=0)
    assert near[3] == Accelerator(3, numa=1, island=1)
    machine = ClusterNode("a", 16, tuple(near[i] for i in range(4)))
    assert laid([machine], ResourceRequest("generator", 2, gpus=2)) == {
        "generator": [("a", "0,2"), ("a", "1,3")]
    }
    # one taken from the first pair: a pair comes from the other, whole
    found = laid(
        [machine], ResourceRequest("critic", 1, gpus=1), ResourceRequest("generator", 1, gpus=2)
    )
    assert found == {"critic": [("a", "0")], "generator": [("a", "1,3")]}
    assert laid([machine], ResourceRequest("learner", 4, gpus=1))["learner"] == [
        ("a", "0"),
        ("a", "2"),
        ("a", "1"),
        ("a", "3"),
    ]
    assert parse_topology("") == {}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,3", [Accelerator(0, 0, 0, "2"), Accelerator(1, 1, 1, "3")]),
        ("3, 1,0", [Accelerator(0, 1, 1, "3"), Accelerator(1, 1, 1, "1")]),
        ("GPU-8b2e,0", [Accelerator(0, None, None, "GPU-8b2e"), Accelerator(1, 0, 0, "0")]),
    ],
)
def test_accelerators_are_named_as_the_environment_names_them(visible, expected, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("ratchet.executors.devices._read_topology", lambda: PAIRS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    accelerators = find_accelerators()
    assert list(accelerators) == expected
    bundles = laid([ClusterNode("a", 8, accelerators)], ResourceRequest("learner", 2, gpus=1))
    assert {name for _, name in bundles["learner"]} == {a.cuda_name for a in accelerators}


def test_a_scheduler_that_decides_itself():
    cluster = VirtualCluster(ResourceManager([A4, B4]))
    cluster.plan(
        [
            ResourceRequest("learner", 4, gpus=1),
            ResourceRequest("generator", 2, gpus=2, colocated_with="learner"),
        ]
    )
    given = [
        cluster.bundles("learner")[0].__class__(n, (Accelerator(i),), 1.0)
        for n, i in [("b", 3), ("b", 0), ("a", 1), ("a", 2)]
    ]
    cluster.set_bundles("learner", given)
    assert [(b.node, b.visible_devices, b.local_rank) for b in cluster.bundles("learner")] == [
        ("a", "1", 0), ("a", "2", 1), ("b", "0", 0), ("b", "3", 1),
    ]  # fmt: skip
    assert [(b.node, b.visible_devices) for b in cluster.bundles("generator")] == [
        ("a", "1,2"),
        ("b", "0,3"),
    ]


def test_this_machine():
    assert find_node(3, "cpu").cpus == 3
    assert find_node(3, "cpu").accelerators == ()
    with pytest.raises(
        ConfigError, match=r"cluster.devices lists \[7\], but this process sees none"
    ):
        find_node(3, "cpu", (7,))
