"""Ray session and placement: which devices the trainer's ranks and the engines get.

A device is a GPU where the cluster has any, else a slot on the CPU: the same plan either way.
Colocated, trainer and engines share the first devices; otherwise the engines come after.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sleuth.arguments import Args
from sleuth.cluster.ray_environment import cluster_address, prepare_environment

PLACEMENT_TIMEOUT_SECONDS = 120.0
SHARE = 0.4
"""Part of a device that each colocated actor claims in Ray's books; two fit, three do not."""


@contextmanager
def ray_session(args: Args) -> Iterator[None]:
    """Connect to the cluster named by `--ray-address` or RAY_ADDRESS, or start one on this machine."""
    address, _ = cluster_address(args) or (None, "")
    prepare_environment(address)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    if address:
        ray.init(address=address, log_to_driver=True)
    else:
        # These are slots, not cores: a laptop may have fewer cores than ranks, which then take turns.
        slots = max(os.cpu_count() or 1, args.total_gpus) + 1
        ray.init(address="local", num_cpus=slots, include_dashboard=False, log_to_driver=True, configure_logging=False)
    signal.signal(signal.SIGTERM, on_sigterm)  # ray.init replaced the caller's handler
    try:
        yield
    finally:
        ray.shutdown()


def cluster_has_gpus() -> bool:
    """Whether any node of the Ray cluster has a GPU; if none has, devices are slots on CPUs."""
    return ray.cluster_resources().get("GPU", 0) > 0


@dataclass(frozen=True, slots=True)
class Device:
    """One bundle of the placement group, and the GPU behind it (None on a CPU)."""

    bundle: int
    node_ip: str
    gpu_id: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of a run. `trainer[rank]` and `engines[i]` may be the same device."""

    group: PlacementGroup
    trainer: list[Device]
    engines: list[Device]

    def options(self, device: Device, env: dict[str, str] | None = None) -> dict[str, Any]:
        """Ray options that put an actor on `device`, beside another one."""
        on_gpu = device.gpu_id is not None
        variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} if on_gpu else {}
        return {
            "num_cpus": SHARE,
            "num_gpus": SHARE if on_gpu else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, device.bundle),
            "runtime_env": {"env_vars": variables | (env or {})},
        }

    def remove(self) -> None:
        remove_placement_group(self.group)


def place(args: Args) -> Placement:
    """Reserve the devices. Raises RuntimeError when the cluster does not have them, or not on one node."""
    trainer, count = 0 if args.debug_rollout_only else args.actor_world_size, args.total_gpus
    engines = args.num_engines * args.rollout_num_gpus_per_engine
    on_gpu = cluster_has_gpus()
    bundle: dict[str, float] = {"CPU": 1, "GPU": 1} if on_gpu else {"CPU": 1}
    group = placement_group([bundle] * count, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=PLACEMENT_TIMEOUT_SECONDS)
    except ray.exceptions.GetTimeoutError:
        remove_placement_group(group)
        raise RuntimeError(
            f"expected {count} free {'GPUs' if on_gpu else 'CPU slots'} within {PLACEMENT_TIMEOUT_SECONDS:.0f} s "
            f"({trainer} for the trainer, {engines} for the engines, colocate={args.colocate}); "
            f"the cluster has {ray.available_resources()}. Lower --actor-num-gpus-per-node or --rollout-num-gpus, "
            "or add nodes"
        ) from None
    devices = _devices(group, count, on_gpu)
    first_engine = 0 if args.colocate else trainer
    nodes = sorted({device.node_ip for device in devices})
    if engines and len(nodes) > 1:
        remove_placement_group(group)
        raise RuntimeError(
            f"expected the run's {count} devices on one node, found them on {', '.join(nodes)}: engines answer only "
            "on their own node, so runs over several are not supported yet. Use a node with enough GPUs"
        )
    return Placement(group, devices[:trainer], devices[first_engine : first_engine + engines])


def _devices(group: PlacementGroup, count: int, on_gpu: bool) -> list[Device]:
    """The bundles ordered by node and GPU, so that neighbouring ranks share a node."""

    @ray.remote(num_cpus=0.01, num_gpus=0.01 if on_gpu else 0)
    def where() -> tuple[str, int | None]:
        ids = ray.get_gpu_ids()
        return ray.util.get_node_ip_address(), int(ids[0]) if ids else None

    found = ray.get(
        [where.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, i)).remote() for i in range(count)]
    )
    devices = [Device(i, ip, gpu) for i, (ip, gpu) in enumerate(found)]
    return sorted(devices, key=lambda d: (tuple(map(int, d.node_ip.split("."))), d.gpu_id or 0, d.bundle))
