"""How a rank joins a run directory and writes to it: no collective, no barrier, no file written by two ranks."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mappnb.errors import RunExistsError
from mappnb.paths import INC, INC_NAME, INCARNATION, RANK_NAME, RANKS, RUN, check_version
from mappnb.schema import FORMAT_VERSION
from mappnb.segment_writer import TableWriter, write_file
from mappnb.table_specs import TABLES

__all__ = ["RunWriter", "continues"]

LATE_NS = 60 * 10**9
"""A rank without an id joins an incarnation that is not older: it is of the same launch."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)  # of the file system


def _publish(path: Path, content: Mapping[str, Any]) -> bool:
    """Write a JSON file that must not exist yet; False if another process was first. The content is whole or absent."""
    tmp = path.with_name(f"{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        tmp.write_text(json.dumps(content, indent=1))
        os.link(tmp, path)
    except FileExistsError:
        return False
    except OSError as err:
        if err.errno not in _NO_LINKS:
            raise
        with contextlib.suppress(FileExistsError), open(path, "x") as sink:
            sink.write(json.dumps(content, indent=1))
            return True
        return False
    finally:
        tmp.unlink(missing_ok=True)
    return True


def _plain(value: Any) -> Any:
    """Return a NumPy number or a tensor as plain values, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


@dataclass
class RunWriter:
    """One rank's hold on a run directory. Make it with :meth:`join`.

    Attributes
    ----------
    root : Path
        The run directory.
    run_id : str
        Identity of the run, the same for all ranks and incarnations.
    created_wall_ns : int
        Wall-clock time at which the run was created: zero of the run clock.
    incarnation : int
        Number of this restart of the job.
    rank, world_size : int
        Global rank and number of ranks.
    """

    root: Path
    run_id: str
    created_wall_ns: int
    incarnation: int
    rank: int
    world_size: int
    _tables: dict[str, TableWriter] = field(default_factory=dict)

    @classmethod
    def join(
        cls,
        run_dir: str | os.PathLike[str],
        *,
        rank: int,
        world_size: int,
        launch: Mapping[str, str],
        resume: bool = False,
        created_wall_ns: int | None = None,
    ) -> RunWriter:
        """Create the run directory, or join the one that the other ranks of this launch made.

        Parameters
        ----------
        run_dir : path
            On storage that all ranks see.
        rank, world_size : int
            Global rank and number of ranks.
        launch : mapping of str to str
            What this launch of the job has in common over its ranks and no other launch has, such as the launcher's
            job id and restart count. ``job`` in it tells restarts of one job: they continue the run by themselves.
        resume : bool
            Continue a run that another job wrote, as a new incarnation. Nothing is ever overwritten.
        created_wall_ns : int, optional
            Zero of the run clock, should this rank be the first; now by default.

        Raises
        ------
        RunExistsError
            If the directory holds a run of another job and ``resume`` is False, or other files.
        FormatVersionError
            If a newer mappnb wrote it.
        """
        root = Path(run_dir)
        try:
            root.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as err:
            raise RunExistsError(f"{root}: a file, not a folder; give mappnb.record a new or an empty folder") from err
        if not (root / RUN).exists():
            _refuse_foreign(root)
        fresh = {
            "format_version": FORMAT_VERSION,
            "run_id": uuid.uuid4().hex,
            "created_wall_ns": created_wall_ns or time.time_ns(),
            "created_by": {"host": socket.gethostname(), "rank": rank, "pid": os.getpid()},
            "launch": dict(launch),
        }
        _publish(root / RUN, fresh)
        run = json.loads((root / RUN).read_text())
        check_version(run, str(root))
        number = _join_incarnation(root, rank=rank, world_size=world_size, launch=launch, resume=resume)
        return cls(root, run["run_id"], run["created_wall_ns"], number, rank, world_size)

    @property
    def path(self) -> Path:
        """The folder of this incarnation."""
        return self.root / INC_NAME.format(self.incarnation)

    def _rank_file(self) -> Path:
        return self.path / RANKS / f"{RANK_NAME.format(self.rank)}.json"

    def write_rank(self, content: Mapping[str, Any]) -> None:
        """Write what is known of this rank: host, device, layout, groups, first clock anchor. Replaces what was there."""
        whole = {
            "format_version": FORMAT_VERSION,
            "run_id": self.run_id,
            "incarnation": self.incarnation,
            "rank": self.rank,
            "world_size": self.world_size,
            **content,
        }
        path = self._rank_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, lambda sink: sink.write(json.dumps(whole, indent=1, default=_plain).encode()))

    def reserve(self, size: int = 16384) -> None:
        """Hold back a little space, so that a note can still be left when the disk is full (:meth:`release`)."""
        path = self._rank_file().with_suffix(".reserve.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))

    def release(self) -> None:
        """Give the space of :meth:`reserve` back."""
        self._rank_file().with_suffix(".reserve.tmp").unlink(missing_ok=True)

    def table(self, name: str, *, site: Callable[[int], Iterable[Any]] | None = None, **options: Any) -> TableWriter:
        """Return the writer of one of this rank's tables (``mappnb.table_specs.TABLES``)."""
        if name not in self._tables:
            header = {
                "format_version": FORMAT_VERSION,
                "run_id": self.run_id,
                "incarnation": self.incarnation,
                "rank": self.rank,
                "table": name,
            }
            folder = self.path / name / RANK_NAME.format(self.rank)
            self._tables[name] = TableWriter(folder, TABLES[name], header, site=site, **options)
        return self._tables[name]

    def close(self) -> None:
        """Close every table."""
        for table in self._tables.values():
            table.close()
        self.release()

    def abandon(self) -> None:
        """Let go of every table without writing."""
        for table in self._tables.values():
            table.abandon()


def _refuse_foreign(root: Path) -> None:
    others = [p.name for p in root.iterdir() if not p.name.endswith(".tmp") and p.name != RUN and not INC.match(p.name)]
    if others and not (root / RUN).exists():
        shown = ", ".join(sorted(others)[:3]) + (", ..." if len(others) > 3 else "")
        raise RunExistsError(
            f"{root}: the folder is not empty and not a run directory (holds {shown}); give mappnb.record a new or an empty folder"
        )


def _join_incarnation(root: Path, *, rank: int, world_size: int, launch: Mapping[str, str], resume: bool) -> int:
    """Find the incarnation of this launch, or begin the next one."""
    for _ in range(1000):
        known = sorted(int(m[1]) for p in root.iterdir() if (m := INC.match(p.name)))
        last = known[-1] if known else -1
        if last >= 0:
            info_path = root / INC_NAME.format(last) / INCARNATION
            if not info_path.exists():  # another rank is between mkdir and publish
                time.sleep(0.01)
                if not _stale(info_path.parent):
                    continue
            info = json.loads(info_path.read_text()) if info_path.exists() else {}
            mine = info_path.parent / RANKS / f"{RANK_NAME.format(rank)}.json"
            same = info.get("launch") == dict(launch) or _without_id(info, launch)
            if same and info.get("world_size") == world_size and not mine.exists():
                return last
            if info and not (resume or continues(info.get("launch", {}), launch)):
                raise RunExistsError(
                    f"{root}: holds a run already (incarnation {last}, {info.get('world_size')} ranks, created by another job); "
                    f"choose a new run directory, or continue this run with mappnb.record(..., resume=True) "
                    f"or 'mappnb exec --resume'; nothing was overwritten"
                )
        folder = root / INC_NAME.format(last + 1)
        folder.mkdir(exist_ok=True)
        content = {
            "format_version": FORMAT_VERSION,
            "incarnation": last + 1,
            "world_size": world_size,
            "created_wall_ns": time.time_ns(),
            "launch": dict(launch),
        }
        _publish(folder / INCARNATION, content)  # whoever was first: look again and join
    raise RunExistsError(
        f"{root}: could not agree on an incarnation with the other ranks; is the storage shared and coherent?"
    )


def _without_id(info: Mapping[str, Any], launch: Mapping[str, str]) -> bool:
    """Return True for a rank that came after its process group was gone, and so could not ask for the id of the launch."""
    before = {k: v for k, v in info.get("launch", {}).items() if k != "id"}
    fresh = time.time_ns() - int(info.get("created_wall_ns", 0)) < LATE_NS
    return "id" not in launch and before == dict(launch) and fresh


def continues(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Return True if a launch is a restart of the one before: same named job, or the same launcher with a higher restart count."""
    if now.get("job") and before.get("job") == now["job"]:
        return True
    counter = "TORCHELASTIC_RESTART_COUNT"
    same = {k: v for k, v in before.items() if k not in (counter, "id")} == {
        k: v for k, v in now.items() if k not in (counter, "id")
    }
    return same and before.get(counter, "0").isdigit() and int(now.get(counter, "0")) > int(before.get(counter, "0"))


def _stale(folder: Path, seconds: float = 10.0) -> bool:
    try:
        return time.time() - folder.stat().st_mtime > seconds
    except OSError:
        return False
