"""Data sheets of accelerators, for estimates of what a cluster can do.

Ratchet has measured none of these numbers: an estimate is the vendor's peak figure times the share
of it that trainers usually reach.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from ratchet.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class AcceleratorDatasheet:
    """The data sheet of an accelerator."""

    memory: float  # bytes
    flop_s: float  # dense bfloat16 operations per second
    bandwidth: float  # memory bandwidth, bytes/s
    link: float  # bandwidth to other accelerators in the same node, bytes/s


DATASHEET_BY_KIND: dict[str, AcceleratorDatasheet] = {
    "A100-40": AcceleratorDatasheet(40 * GIB, 312e12, 1.555e12, 600e9),
    "A100": AcceleratorDatasheet(80 * GIB, 312e12, 2.039e12, 600e9),
    "H100": AcceleratorDatasheet(80 * GIB, 989e12, 3.35e12, 900e9),
    "H200": AcceleratorDatasheet(141 * GIB, 989e12, 4.8e12, 900e9),
    "B200": AcceleratorDatasheet(180 * GIB, 2250e12, 7.7e12, 1800e9),
    "L40S": AcceleratorDatasheet(48 * GIB, 362e12, 0.864e12, 64e9),
    "RTX4090": AcceleratorDatasheet(24 * GIB, 165e12, 1.008e12, 64e9),
}
# Shares of the peak that training, scoring forwards and decoding usually reach.
UPDATE_SHARE, SCORE_SHARE, DECODE_SHARE = 0.4, 0.5, 0.6
USABLE_MEMORY_SHARE = 0.92  # the CUDA context and the allocator take the rest


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster of equal nodes, as given by `--cluster`."""

    nodes: int
    per_node: int
    kind: str

    @classmethod
    def parse(cls, text: str) -> ClusterSpec:
        """Parse "2x8xH100", or "8xH100" for one node. Raises ConfigError."""
        match = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z][\w-]*)", text.replace(" ", ""))
        if match is None:
            raise ConfigError(
                f"--cluster {text}: give NODESxACCELERATORSxKIND, for example 2x8xH100"
            )
        kind = match[3].upper()
        if kind not in DATASHEET_BY_KIND:
            similar_kinds = get_close_matches(kind, DATASHEET_BY_KIND, n=1)
            hint = f"did you mean {similar_kinds[0]}? " if similar_kinds else ""
            raise ConfigError(
                f"--cluster {text}: '{match[3]}' is unknown; {hint}the kinds are "
                f"{', '.join(DATASHEET_BY_KIND)}"
            )
        nodes = int(match[1] or 1)
        per_node = int(match[2])
        if not nodes * per_node:
            raise ConfigError(f"--cluster {text}: it has no accelerators")
        return cls(nodes, per_node, kind)

    @property
    def accelerator(self) -> AcceleratorDatasheet:
        """Return the data sheet of the cluster's accelerators."""
        return DATASHEET_BY_KIND[self.kind]

    @property
    def count(self) -> int:
        """Return the number of accelerators in the cluster."""
        return self.nodes * self.per_node
