"""The trainer: a policy in megatron-core, on GPUs or on a CPU.

Importing this package prepares megatron-core for this machine (see `device.py`), so its modules may import
megatron in any order.
"""

from sleuth.megatron import device

device.install()
