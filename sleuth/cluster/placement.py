"""Ray session and placement: which devices the trainer's ranks and the engines get.

A device is a GPU where the cluster has any, else a slot on the CPU: the same plan either way.
Colocated, trainer and engines share the first devices; otherwise the engines come after.

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

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sleuth.arguments import Args
from sleuth.cluster.ray_environment import cluster_address, prepare_environment
from sleuth.engine.devices import check_granted
from sleuth.leftovers import record
from sleuth.weight_sync.sources import Source, sources_of

PLACEMENT_TIMEOUT_SECONDS = 120.0
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
        ray.init(address=address, log_to_driver=True)
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

    def options(self, device: Device, env: dict[str, str] | None = None) -> dict[str, Any]:
        """Ray options that put an actor on `device`, beside another one."""
        on_gpu = device.gpu_id is not None
        variables = NOT_SET_BY_RAY if on_gpu else {}
        return {
            "num_cpus": SHARE,
            "num_gpus": SHARE if on_gpu else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, device.bundle),
            "runtime_env": {"env_vars": variables | (env or {})},
        }

    def sources(self, gpus_per_engine: int) -> list[Source]:
        """Which trainer ranks serve which engine with weights."""
        trainer, engines = ([device.bundle for device in devices] for devices in (self.trainer, self.engines))
        return sources_of(trainer, engines, gpus_per_engine, on_gpu=self.trainer[0].gpu_id is not None)

    def remove(self) -> None:
        remove_placement_group(self.group)


def place(args: Args) -> Placement:
    """Reserve the devices.

    Raises RuntimeError when the cluster does not have them, or not on one node; ValueError where Ray grants GPUs that
    its processes cannot use, or not in this way.
    """
    trainer, count = args.actor_world_size if args.trains else 0, args.total_gpus
    engines = args.num_engines * args.rollout_num_gpus_per_engine
    on_gpu = cluster_has_gpus()
    group = _reserve(count, on_gpu, f"{trainer} for the trainer, {engines} for the engines, colocate={args.colocate}")
    try:
        devices = _devices(group, count, on_gpu)
        first_engine = 0 if args.colocate else trainer
        placement = Placement(group, devices[:trainer], devices[first_engine : first_engine + engines])
        _check(placement, devices, args.rollout_num_gpus_per_engine)
    except Exception:
        remove_placement_group(group)
        raise
    return placement


def _reserve(count: int, on_gpu: bool, wanted: str) -> PlacementGroup:
    bundle: dict[str, float] = {"CPU": 1, "GPU": 1} if on_gpu else {"CPU": 1}
    group = placement_group([bundle] * count, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=PLACEMENT_TIMEOUT_SECONDS)
    except ray.exceptions.GetTimeoutError:
        remove_placement_group(group)
        raise RuntimeError(
            f"expected {count} free {'GPUs' if on_gpu else 'CPU slots'} within {PLACEMENT_TIMEOUT_SECONDS:.0f} s "
            f"({wanted}); the cluster has {ray.available_resources()}. Lower --actor-num-gpus-per-node or "
            "--rollout-num-gpus, or add nodes"
        ) from None
    return group


def _devices(group: PlacementGroup, count: int, on_gpu: bool) -> list[Device]:
    """The bundles ordered by node and GPU, so that neighbouring ranks share a node."""

    @ray.remote(num_cpus=0.01, num_gpus=0.01 if on_gpu else 0, runtime_env={"env_vars": NOT_SET_BY_RAY})
    def where() -> tuple[str, str | None, int]:
        ids = [str(gpu) for gpu in ray.get_gpu_ids()]
        gpu = ids[0] if ids else None
        return ray.util.get_node_ip_address(), gpu, _position(gpu, os.environ.get("CUDA_VISIBLE_DEVICES"))

    found = ray.get(
        [where.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, i)).remote() for i in range(count)]
    )
    order = {i: (tuple(map(int, ip.split("."))), position, i) for i, (ip, _, position) in enumerate(found)}
    return [Device(i, *found[i][:2]) for i in sorted(order, key=order.__getitem__)]


def _position(gpu: str | None, visible: str | None) -> int:
    """Where a GPU stands among its node's: UUIDs say nothing of that, the list from which Ray grants does."""
    if gpu is None:
        return 0
    listed = [part.strip() for part in (visible or "").split(",")]
    if gpu in listed:
        return listed.index(gpu)
    return int(gpu) if gpu.isdecimal() else 0


def _check(placement: Placement, devices: list[Device], gpus_per_engine: int) -> None:
    nodes = sorted({device.node_ip for device in devices})
    if placement.engines and len(nodes) > 1:
        raise RuntimeError(
            f"expected the run's {len(devices)} devices on one node, found them on {', '.join(nodes)}: engines answer "
            "only on their own node, so runs over several are not supported yet. Use a node with enough GPUs"
        )
    slices = [device.gpu_id for device in placement.engines if (device.gpu_id or "").startswith("MIG")]
    if slices and gpus_per_engine > 1:
        raise ValueError(
            f"--rollout-num-gpus-per-engine {gpus_per_engine}: expected 1 where GPUs are cut into slices, since CUDA "
            f"shows a process only one, found {', '.join(map(str, slices))}; use 1, or whole GPUs"
        )
    # What actors find out when they start, told before any of them does: one look a node, since it imports torch.
    look: Any = ray.remote(check_granted)
    firsts = {device.node_ip: (device, device.gpu_id) for device in reversed(devices) if device.gpu_id is not None}
    small = {"num_cpus": 0.01, "num_gpus": 0.01}
    ray.get([look.options(**placement.options(device) | small).remote((gpu,)) for device, gpu in firsts.values()])
