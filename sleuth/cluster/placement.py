"""Ray session and placement: which devices the trainer's ranks and the engines get.

A device is a GPU where the cluster has any, else a slot on the CPU: the same plan either way.
Colocated, trainer and engines share the first devices; otherwise the engines come after. Over several nodes,
`sleuth.cluster.layout` says which lie together, and each bundle asks for its node.

A GPU goes by the id that Ray grants: a number, a UUID or a MIG id, as in the node's CUDA_VISIBLE_DEVICES. Ray must not
set that variable (`NOT_SET_BY_RAY`), for an engine's devices are granted to several bundles and it would see only the
first. Instead every process gets it with exactly its own devices, and calls them 0, 1, ... (`sleuth.engine.devices`):

* No ordinal then depends on what else the node shows: a Slurm job with CUDA_VISIBLE_DEVICES=4,5,6,7, a grant of
  0,3,4,5 and UUIDs are all the same. SGLang counts from `--base-gpu-id` on, so it is 0, and no neighbour's GPU follows.
* NCCL reaches GPUs that a process does not see (CUDA 10.1 and later).
* CUDA IPC needs the device of a shared tensor to be visible on both sides, under whatever number. A trainer rank and
  the engine's rank that it sends to share one device, which is in both lists. torch names it by the sender's ordinal,
  always 0 there: so `sleuth.weight_sync.handles` names it by its UUID, as SGLang's engines expect.
"""

from __future__ import annotations

import ipaddress
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sleuth.arguments import Args
from sleuth.cluster.layout import LayoutError, crossing, lay_out
from sleuth.cluster.ray_environment import cluster_address, passed_on, prepare_environment
from sleuth.cluster.shipping import is_checkout, nodes_without_project, shipped_project
from sleuth.engine.devices import check_granted
from sleuth.engine.server import HOST
from sleuth.leftovers import record
from sleuth.weight_sync.sources import Source, sources_of

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_SECONDS = 120.0
POLL_SECONDS = 1.0
NOT_SET_BY_RAY = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
SHARE = 0.4
"""Part of a device that each colocated actor claims in Ray's books; two fit, three do not."""


@contextmanager
def ray_session(args: Args) -> Iterator[None]:
    """Connect to the cluster named by `--ray-address` or RAY_ADDRESS, or start one on this machine."""
    address, _ = cluster_address(args) or (None, "")
    prepare_environment(address)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    if address:
        _join(address)
    else:
        # These are slots, not cores: a laptop may have fewer cores than ranks, which then take turns.
        slots = max(os.cpu_count() or 1, args.total_gpus) + 1
        ray.init(address="local", num_cpus=slots, include_dashboard=False, log_to_driver=True, configure_logging=False)
        record(session_folder())
    signal.signal(signal.SIGTERM, on_sigterm)  # ray.init replaced the caller's handler
    try:
        yield
    finally:
        ray.shutdown()


def _join(address: str) -> None:
    """Connect to a cluster; where nodes lack the project, once more, with a copy of it for them."""
    ray.init(address=address, log_to_driver=True)
    if is_checkout() and (lacking := nodes_without_project()):
        logger.warning(
            "node %s does not have the project: Ray ships it there. Python and its packages (%s), the model and "
            "checkpoints must be there already",
            *(", ".join(lacking), sys.prefix),
        )
        ray.shutdown()
        ray.init(address=address, log_to_driver=True, runtime_env=shipped_project())


def session_folder() -> Path:
    """Where the Ray that this process is connected to keeps its logs and sockets."""
    node: Any = ray._private.worker._global_node
    return Path(node.get_session_dir_path())


def cluster_has_gpus() -> bool:
    """Whether any node of the Ray cluster has a GPU; if none has, devices are slots on CPUs."""
    return ray.cluster_resources().get("GPU", 0) > 0


@dataclass(frozen=True, slots=True)
class Device:
    """One bundle of the placement group, and the GPU behind it, by the id that Ray grants (None on a CPU)."""

    bundle: int
    node_ip: str
    gpu_id: str | None


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of a run. `trainer[rank]` and `engines[i]` may be the same device."""

    group: PlacementGroup
    trainer: list[Device]
    engines: list[Device]
    driver_ip: str = HOST
    """The node on which `train.py` runs; the rollout's hooks run there, too."""

    @property
    def nodes(self) -> list[str]:
        """The addresses of all nodes of the run, the driver's first."""
        return list(dict.fromkeys([self.driver_ip, *(device.node_ip for device in (*self.trainer, *self.engines))]))

    def host(self, node_ip: str) -> str:
        """The address at which a server on this node listens: its own only where other nodes must reach it."""
        return node_ip if len(self.nodes) > 1 else HOST

    def options(self, device: Device, env: dict[str, str] | None = None) -> dict[str, Any]:
        """Ray options that put an actor on `device`, beside another one."""
        on_gpu = device.gpu_id is not None
        variables = NOT_SET_BY_RAY if on_gpu else {}
        return {
            "num_cpus": SHARE,
            "num_gpus": SHARE if on_gpu else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, device.bundle),
            "runtime_env": {"env_vars": passed_on(os.environ) | variables | (env or {})},
        }

    def engine_shares(self, gpus_per_engine: int) -> list[list[list[Device]]]:
        """For each engine its devices on each of its nodes."""
        found = []
        for first in range(0, len(self.engines), gpus_per_engine):
            devices = self.engines[first : first + gpus_per_engine]
            by_node = [list(share) for _, share in itertools.groupby(devices, lambda device: device.node_ip)]
            found.append(by_node)
        return found

    def sources(self, gpus_per_engine: int) -> list[Source]:
        """Which trainer ranks serve which engine with weights."""
        trainer, engines = ([device.bundle for device in devices] for devices in (self.trainer, self.engines))
        nodes = {device.bundle: device.node_ip for device in (*self.trainer, *self.engines)}
        on_gpu = self.trainer[0].gpu_id is not None
        return sources_of(trainer, engines, gpus_per_engine, on_gpu=on_gpu, nodes=nodes)

    def remove(self) -> None:
        remove_placement_group(self.group)


def place(args: Args) -> Placement:
    """Reserve the devices.

    Raises RuntimeError when a cluster of one node does not have them; LayoutError when one of several does not, or what
    must share a node cannot.
    """
    trainer, count = args.actor_world_size if args.trains else 0, args.total_gpus
    engines = args.num_engines * args.rollout_num_gpus_per_engine
    on_gpu = cluster_has_gpus()
    wanted = f"{trainer} for the trainer, {engines} for the engines, colocate={args.colocate}"
    nodes = _choose_nodes(args, on_gpu) if len(alive_nodes()) > 1 else [None] * count
    group = _reserve(nodes, on_gpu, wanted)
    try:
        devices = _devices(group, nodes, on_gpu)
        first_engine = 0 if args.colocate else trainer
        engine_devices = devices[first_engine : first_engine + engines]
        placement = Placement(group, devices[:trainer], engine_devices, ray.util.get_node_ip_address())
        if problems := list(crossing(args, [device.node_ip for device in devices])):
            raise LayoutError("; ".join(problems))
    except Exception:
        remove_placement_group(group)
        raise
    return placement


def alive_nodes() -> list[dict[str, Any]]:
    """What Ray knows of each node of the cluster that is alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def free_devices(on_gpu: bool) -> dict[str, int]:
    """How many devices no other run has, by the address of their node."""
    left = available_resources_per_node()
    free: dict[str, int] = {}
    for node in sorted(alive_nodes(), key=lambda node: _address_order(node["NodeManagerAddress"])):
        found = left.get(node["NodeID"], {})
        count = min(found.get(name, 0) for name in (("CPU", "GPU") if on_gpu else ("CPU",)))
        free[node["NodeManagerAddress"]] = free.get(node["NodeManagerAddress"], 0) + int(count)
    return free


def _choose_nodes(args: Args, on_gpu: bool) -> list[str]:
    """The node of each device; waits a while for devices of other runs, and for nodes that still start."""
    deadline = time.monotonic() + PLACEMENT_TIMEOUT_SECONDS
    while True:
        try:
            return lay_out(args, free_devices(on_gpu))
        except LayoutError as error:
            if time.monotonic() > deadline:
                raise LayoutError(f"{error} (after {PLACEMENT_TIMEOUT_SECONDS:.0f} s)") from None
        time.sleep(POLL_SECONDS)


def _reserve(nodes: Sequence[str | None], on_gpu: bool, wanted: str) -> PlacementGroup:
    bundle: dict[str, float] = {"CPU": 1, "GPU": 1} if on_gpu else {"CPU": 1}
    # Every node has a little of a resource that is named after its address.
    bundles = [bundle | ({f"node:{node}": 0.001} if node else {}) for node in nodes]
    group = placement_group(bundles, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=PLACEMENT_TIMEOUT_SECONDS)
    except ray.exceptions.GetTimeoutError:
        remove_placement_group(group)
        raise RuntimeError(
            f"expected {len(nodes)} free {'GPUs' if on_gpu else 'CPU slots'} within {PLACEMENT_TIMEOUT_SECONDS:.0f} s "
            f"({wanted}); the cluster has {ray.available_resources()}. Lower --actor-num-gpus-per-node or "
            "--rollout-num-gpus, or add nodes"
        ) from None
    return group


def _devices(group: PlacementGroup, nodes: Sequence[str | None], on_gpu: bool) -> list[Device]:
    """The bundles in the order of `nodes`, those of one node by GPU: so neighbouring ranks share a node."""

    @ray.remote(num_cpus=0.01, num_gpus=0.01 if on_gpu else 0, runtime_env={"env_vars": NOT_SET_BY_RAY})
    def where() -> tuple[str, str | None, str | None]:  # goes by value: a node may lack the project
        ids = [str(gpu) for gpu in ray.get_gpu_ids()]
        return ray.util.get_node_ip_address(), ids[0] if ids else None, os.environ.get("CUDA_VISIBLE_DEVICES")

    found = ray.get(
        [
            where.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, i)).remote()
            for i in range(len(nodes))
        ]
    )
    order = {i: (_address_order(ip), _position(gpu, visible), i) for i, (ip, gpu, visible) in enumerate(found)}
    devices = [Device(i, *found[i][:2]) for i in sorted(order, key=order.__getitem__)]
    return devices if nodes[0] is None else _in_order(devices, nodes)


def _in_order(devices: Sequence[Device], nodes: Sequence[str | None]) -> list[Device]:
    """The devices so that the i-th lies on `nodes[i]`; those of one node stay in their order."""
    left = {node: [device for device in devices if device.node_ip == node] for node in nodes}
    return [left[node].pop(0) for node in nodes]


def _address_order(address: str) -> int:
    return int(ipaddress.ip_address(address))


def _position(gpu: str | None, visible: str | None) -> int:
    """Where a GPU stands among its node's: UUIDs say nothing of that, the list from which Ray grants does."""
    if gpu is None:
        return 0
    listed = [part.strip() for part in (visible or "").split(",")]
    if gpu in listed:
        return listed.index(gpu)
    return int(gpu) if gpu.isdecimal() else 0


def check_devices(placement: Placement, gpus_per_engine: int) -> None:
    """ValueError where Ray grants GPUs that the run's processes cannot use; it looks from each node."""
    slices = [device.gpu_id for device in placement.engines if (device.gpu_id or "").startswith("MIG")]
    if slices and gpus_per_engine > 1:
        raise ValueError(
            f"--rollout-num-gpus-per-engine {gpus_per_engine}: expected 1 where GPUs are cut into slices, since CUDA "
            f"shows a process only one, found {', '.join(map(str, slices))}; use 1, or whole GPUs"
        )
    # What actors find out when they start, told before any of them does: one look a node, since it imports torch.
    look: Any = ray.remote(check_granted)
    devices = (*placement.engines, *placement.trainer)
    firsts = {device.node_ip: (device, device.gpu_id) for device in reversed(devices) if device.gpu_id is not None}
    small = {"num_cpus": 0.01, "num_gpus": 0.01}
    ray.get([look.options(**placement.options(device) | small).remote((gpu,)) for device, gpu in firsts.values()])
