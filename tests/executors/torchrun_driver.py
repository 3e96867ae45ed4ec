"""What test_torchrun.py starts under torchrun: a driver in rank 0, which prints what it saw."""

import json
import os
import signal
import sys

from ratchet.errors import ConfigError, WorkerDied
from ratchet.executors.config import TorchrunClusterConfig
from ratchet.executors.placement import ResourceRequest
from ratchet.executors.torchrun import TorchrunExecutor, TorchrunRank, serve_rank

launched = TorchrunRank.from_environment()
assert launched is not None
if launched.rank:
    sys.exit(serve_rank(launched))
executor = TorchrunExecutor(
    TorchrunClusterConfig(timeout_s=60, silence_s=5), threads=2, device="cpu"
)
said: dict = {}
try:
    executor.plan([ResourceRequest("learner", 3, gpus=1)])
except ConfigError as error:
    said["too_much"] = str(error)
executor.plan(
    [
        ResourceRequest("learner", 2, gpus=1),
        ResourceRequest("critic", 1, gpus=1, colocated_with="learner"),
    ]
)
group, critic = executor.group("learner"), executor.group("critic")
group.build_now("executors.components:Collective")
critic.build_now("executors.components:Tiny")
said["sums"] = [float(tensor[0]) for tensor in group.call_now("sum")]
said["places"] = [(place.rank, place.local_rank, place.world_size) for place in group.places]
said["critic"] = critic.call_now("add", 1)
if sys.argv[1] == "die":
    # torchrun ends the driver too, perhaps before it has printed.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        group.call_now("sum", 50, (1, 20))
    except WorkerDied as error:
        said["died"] = [str(error), error.rank]
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
executor.close()
sys.stdout.write(json.dumps(said) + "\n")
