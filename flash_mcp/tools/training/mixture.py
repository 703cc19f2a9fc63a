"""The environments that a run trains on: one, or several in a mixture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from environments.sandbox.needs import Needs
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.records import EnvironmentVersion, GateVerdict, Json, Run
from flash_mcp.protocol.spec import ResolvedSpec, RunSpec
from flash_mcp.state import references
from flash_mcp.state.store import Store
from flash_mcp.tools.training.probe import NO_PROBE, Probe


@dataclass
class Part:
    environment: EnvironmentVersion
    ratio: float
    args: Json
    secrets: list[str]
    """What this environment gets of the run's."""
    probe: Probe = NO_PROBE
    gate: GateVerdict = field(default_factory=GateVerdict)
    """The newest verdict of env_test on it."""

    def spec(self, spec: RunSpec) -> RunSpec:
        """The run's, if this were its only environment."""
        own = {"environment_args": self.args, "secrets": self.secrets}
        return spec.model_copy(update=own)

    def pinned(self) -> Json:
        """As the run's lineage and job.json have it."""
        version = self.environment
        place = {"name": version.name, "digest": version.digest, "path": version.path}
        own: Json = {"ratio": self.ratio, "args": self.args, "secrets": self.secrets}
        seen: Json = {"tasks": self.probe.splits, "overlap": self.probe.overlap}
        return {**place, "owner": version.owner, **own, **seen}


def parts_of(store: Store, spec: RunSpec, first: Run | None) -> list[Part]:
    """The environments of a run, the one that it is named after first. `first` is the run that the
    same idempotency key started before, with the versions that it has.

    FlashError(unknown_environment), FlashError(invalid_argument) if they cannot be mixed.
    """
    if first and first.mixture:
        again: list[Part] = []
        for part in first.mixture:
            version = store.environment(f"{part['name']}@{part['digest']}")
            again.append(Part(version, part["ratio"], part["args"], part["secrets"]))
        return again
    reference = spec.environment
    if first:
        reference = first.environment_reference
    version = references.environment(store, reference)
    parts = [Part(version, 1.0, spec.environment_args, spec.secrets)]
    for name, fields in spec.mixture.items():
        version = references.environment(store, name)
        args, secrets = fields.get("environment_args", {}), fields.get("secrets", [])
        parts.append(Part(version, fields.get("ratio", 1.0), args, secrets))
    if spec.mixture:
        _check(parts)
    return parts


def _check(parts: Iterable[Part]) -> None:
    names: set[str] = set()
    for part in parts:
        name = part.environment.name
        if name in names:
            fix = "name each environment once; one with other arguments needs a push of its own"
            raise FlashError("invalid_argument", f"the mixture has {name} twice", fix=fix)
        names.add(name)
        if Needs.of(Path(part.environment.path)).gateway:
            what = f"{name} is played by agents outside, through a gateway"
            fix = "train on it alone: a mixture has one engine and many environments"
            raise FlashError("invalid_argument", what, fix=fix)


def with_all_secrets(resolved: ResolvedSpec) -> ResolvedSpec:
    """With the secrets of all its environments as the run's: each environment gets its own only."""
    spec = resolved.spec
    names = list(spec.secrets)
    for part in spec.mixture.values():
        names += part.get("secrets", [])
    spec = spec.model_copy(update={"secrets": list(dict.fromkeys(names))})
    return resolved.model_copy(update={"spec": spec})
