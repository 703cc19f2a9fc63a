"""Published versions of environments, and deployments."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flash_mcp.protocol.errors import FlashError, did_you_mean, exam_sealed
from flash_mcp.protocol.exams import REFERENCE
from flash_mcp.protocol.records import EnvironmentVersion, GateVerdict, Json
from flash_mcp.state.database import Connection
from flash_mcp.state.disk import check_quota
from flash_mcp.state.owners import caller, operator_settings

if TYPE_CHECKING:
    from flash_mcp.state.versions import Stage, Version
from collections.abc import Mapping
from typing import Any

from flash_mcp.protocol.records import LIVE_DEPLOYMENT, Deployment
from flash_mcp.state.database import marks


class EnvironmentTable(Connection):
    def add_environment(
        self, *, name: str, digest: str, path: str, size_bytes: int, data: Json | None = None
    ) -> EnvironmentVersion:
        """Record a version of the caller. It becomes the newest of its name, even if it was pushed
        before.

        FlashError(quota_exceeded) if a caller other than the local owner would store too much."""
        files: Json = {"path": path, "size_bytes": size_bytes, "data": data or {}}
        names = {"owner": caller().owner, "name": name, "digest": digest}
        row = EnvironmentVersion(**names, **files, pushed=time.time())
        with self.transaction():
            stored = self.environment_bytes(besides=row)
            limit = self.environment_limit()
            check_quota("environments", stored, size_bytes, limit, "uploads_gib")
            self._put("environments", vars(row))
        return row

    def publish(self, stage: Stage, data: Json | None = None) -> tuple[EnvironmentVersion, Version]:
        """Row and files together: a refused row leaves no files. Raises as `add_environment`."""
        path, size = str(stage.parent / stage.digest), stage.size_bytes
        with self.transaction():
            row = self.add_environment(
                name=stage.parent.name, digest=stage.digest, path=path, size_bytes=size, data=data
            )
            return row, stage.commit()

    def environment_bytes(self, besides: EnvironmentVersion | None = None) -> int:
        sql = "SELECT coalesce(sum(size_bytes), 0) FROM environments WHERE (name, digest) != (?, ?)"
        return self.column(sql, [besides.name, besides.digest] if besides else ["", ""])[0]

    def environment_limit(self) -> int:
        if allowed := operator_settings(self.base).disk.uploads_gib:
            return int(allowed * 2**30)
        return caller().limits.environment_bytes

    def put_gate(
        self,
        digest: str,
        args: Json | None,
        failed: Sequence[str],
        unfinished: Sequence[str] = (),
        accepted: Sequence[str] = (),
    ) -> None:
        """Keep what env_test found of the files with this digest, in place of what it kept."""
        row = {"owner": caller().owner, "digest": digest, "args": _text(args)}
        names = {"failed": failed, "unfinished": unfinished, "accepted": accepted}
        data = {name: list(checks) for name, checks in names.items() if checks}
        with self.transaction():
            self._put("gates", {**row, "time": time.time(), "data": data})

    def gate(self, digest: str, args: Json | None) -> GateVerdict:
        """The newest result of the caller's env_test of these files with these arguments. Another
        owner's decides nothing: they choose what it accepts.
        """
        sql = "SELECT time, data FROM gates WHERE owner = ? AND digest = ? AND args = ?"
        if row := self.first(sql, [caller().owner, digest, _text(args)]):
            return GateVerdict(time=row["time"], **row["data"])
        return GateVerdict()

    def environments(self) -> list[EnvironmentVersion]:
        """All versions, the caller's own first, by name, the newest of a name first."""
        sql = "SELECT * FROM environments ORDER BY owner != ?, owner, name, pushed DESC"
        return self.records(EnvironmentVersion, sql, [caller().owner])

    def environment(self, reference: str) -> EnvironmentVersion:
        """NAME is its newest version; in NAME@DIGEST six characters of the digest do. The caller's
        own come first.

        Raises FlashError(unknown_environment | exam_sealed).
        """
        if reference.startswith(REFERENCE):
            raise exam_sealed(reference)
        name, _, digest = reference.partition("@")
        sql = "SELECT * FROM environments WHERE name = ? ORDER BY owner != ?, pushed DESC"
        versions = self.records(EnvironmentVersion, sql, [name, caller().owner])
        if versions and not digest:
            return versions[0]
        results = [row for row in versions if len(digest) >= 6 and row.digest.startswith(digest)]
        if len({row.digest for row in results}) == 1:
            return results[0]
        if versions:
            what = f"{name!r} has no version {digest!r}"
            fix = f"use {name!r} or one of: {', '.join(row.digest for row in versions[:5])}"
        else:
            names = self.column("SELECT DISTINCT name FROM environments")
            what = f"no environment {name!r} was pushed{did_you_mean(name, names)}"
            fix = "publish one with env_push; env_setup writes a starter"
            if names:
                fix = "publish it with env_push"
        raise FlashError("unknown_environment", what, environment=reference, fix=fix)


def _text(args: Json | None) -> str:
    return json.dumps(args or {}, sort_keys=True)


# -- deployments -----------------------------------------------------------------------------------

DEPLOYS = "deploy(run_id=...) serves a checkpoint; status lists the runs"


class DeploymentTable(Connection):
    def add_deployment(self, row: Mapping[str, Any]) -> Deployment:
        """`row` holds id, owner, name and model at least; its default state is starting. One of
        this id that has ended begins anew.
        """
        now = time.time()
        self._put("deployments", {"state": "starting", "created": now, "updated": now, **row})
        return self.deployment(str(row["id"]))

    def deployments(self, states: Sequence[str] = ()) -> list[Deployment]:
        """Deployments in these states, by default all; oldest first."""
        only = f"WHERE state IN ({marks(states)})" if states else ""
        sql = f"SELECT * FROM deployments {only} ORDER BY created, id"
        return self.records(Deployment, sql, states)

    def deployment(self, deployment_id: str) -> Deployment:
        sql = "SELECT * FROM deployments WHERE id = ?"
        if row := self.record(Deployment, sql, [deployment_id]):
            return row
        live = [row.id for row in self.deployments(LIVE_DEPLOYMENT)]
        raise FlashError(
            "unknown_deployment",
            f"there is no deployment {deployment_id!r}{did_you_mean(deployment_id, live)}",
            deployment_id=deployment_id,
            fix=f"use one of: {', '.join(live)}" if live else DEPLOYS,
        )

    def pending_reason(self, row: Deployment) -> str | None:
        """What the server of a deployment waits for, if the caller sees its run."""
        if row.state != "starting" or row.server_run is None:
            return None
        sql = "SELECT pending_reason FROM runs WHERE id = ?"
        return next(iter(self.column(sql, [row.server_run])), None)

    def update_deployment(
        self, deployment_id: str, *, expected_states: Sequence[str] = (), **values: Any
    ) -> bool:
        values["updated"] = time.time()
        return self.update("deployments", deployment_id, values, expected_states)
