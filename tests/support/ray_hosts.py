"""A Ray cluster of two hosts, as Ray sees it, on this machine.

`python -m tests.support.ray_hosts CPUS` ends with its input."""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main(cpus: int) -> None:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=cpus)
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
