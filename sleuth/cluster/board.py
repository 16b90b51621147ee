"""A board on which an actor notes how far it is, and which the driver reads while it waits for it.

Ray's store of keys and values holds it: an actor that is busy with one call answers no other. It is only for those who
watch, so what goes wrong with it is no error.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict

import ray
from ray.experimental import internal_kv

from sleuth.metrics.progress import Tally

logger = logging.getLogger(__name__)

POST_SECONDS = 1.0
"""Between two notes that are written; those between are dropped."""


class Board:
    """The board called `name`, of the run to which this process belongs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._next_post = 0.0

    def post(self, tally: Tally) -> None:
        """Note it in place of what is there, unless a note was written just before."""
        now = time.monotonic()
        if now < self._next_post:
            return
        self._next_post = now + POST_SECONDS
        try:
            internal_kv._internal_kv_put(self._key(), json.dumps(asdict(tally)))
        except Exception as error:
            logger.info("%s: how far it is could not be noted: %s", self.name, error)

    def read(self) -> Tally | None:
        """What is noted; None if nothing is, or it cannot be read."""
        try:
            found = internal_kv._internal_kv_get(self._key()) if ray.is_initialized() else None
            return None if found is None else Tally(**json.loads(found))
        except Exception as error:
            logger.info("%s: how far it is could not be read: %s", self.name, error)
            return None

    def clear(self) -> None:
        """Take down what is noted."""
        try:
            if ray.is_initialized():
                internal_kv._internal_kv_del(self._key())
        except Exception as error:
            logger.info("%s: what was noted could not be taken down: %s", self.name, error)

    def _key(self) -> str:
        return f"sleuth/{ray.get_runtime_context().get_job_id()}/{self.name}"


ROLLOUT, TRAINING = Board("rollout"), Board("training")
