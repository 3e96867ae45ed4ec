import pytest

from ratchet.executors.config import LocalClusterConfig
from ratchet.executors.local import LocalExecutor
from ratchet.executors.placement import ResourceRequest

TINY = "executors.components:Tiny"
COLLECTIVE = "executors.components:Collective"


@pytest.fixture(scope="module")
def start():
    """start(ranks): a group of tiny components in processes of this machine. All of a module share
    one fork server."""
    made = []

    def start(
        ranks=2,
        factory=TINY,
        arguments=None,
        *,
        role="learner",
        timeout_s=60.0,
        silence_s=60.0,
        preload=(),
    ):
        config = LocalClusterConfig(timeout_s=timeout_s, silence_s=silence_s)
        executor = next((e for e in made if (e.config, e.preload) == (config, preload)), None)
        if executor is None:
            executor = LocalExecutor(config, threads=2, device="cpu", preload=preload)
            made.append(executor)
        executor.plan([ResourceRequest(role, ranks)])
        group = executor.group(role)
        group.build_now(factory, arguments)
        return group

    yield start
    for executor in made:
        executor.close()
