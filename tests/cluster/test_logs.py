"""What the terminal is told of a run that ended with an error."""

from __future__ import annotations

from pathlib import Path

import ray

from sleuth.cluster.logs import failure_message

KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: TrainActor
\tactor_id: 5406f4c5ae3c02021b781c5b01000000
\tpid: 14737
\tnamespace: 603f69b2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"""


def test_a_killed_actor_is_told_in_one_line(tmp_path: Path):
    line, where = failure_message(ray.exceptions.RayActorError(None, KILLED), tmp_path, tmp_path).split("\n")
    assert line.startswith("error: expected TrainActor (process 14737) to live until the end, found it dead")
    assert where == f"(traceback: {tmp_path / 'logs' / 'driver.log'})"


def test_a_checkpoint_to_go_on_from_is_named_where_there_is_one(tmp_path: Path):
    error = ValueError("expected 1, found 2")
    assert "--load" not in failure_message(error, tmp_path, tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    assert "--load" not in failure_message(error, tmp_path, tmp_path)  # it names none that is there
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "iter_0000004/metadata.json").touch()
    last = failure_message(error, tmp_path, tmp_path).splitlines()[-1]
    assert last == f"--load {tmp_path} goes on from step 4, its newest checkpoint"


def test_other_errors_are_told_as_they_are(tmp_path: Path):
    created = ray.exceptions.RayActorError(None, f"The actor died because of an error in its creation task. {KILLED}")
    assert "error: RayActorError: The actor died because" in failure_message(created, tmp_path)
    assert "error: ValueError: expected 1, found 2\n" in failure_message(ValueError("expected 1, found 2"), tmp_path)
