"""Deployments."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from flash_mcp.protocol.errors import FlashError, did_you_mean
from flash_mcp.protocol.records import LIVE_DEPLOYMENT, Deployment
from flash_mcp.state.database import Connection, marks

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
        """The deployment of that id, or FlashError(unknown_deployment)."""
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
        """As `update`."""
        values["updated"] = time.time()
        return self.update("deployments", deployment_id, values, expected_states)
