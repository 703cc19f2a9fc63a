"""What a user does with a target, and what must hold meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from flash_mcp import __version__
from tests.protocol.test_run_folder import SECRET_KEY
from tests.scale.rehearsal import PLANTED, Rehearsal

Check = tuple[str, Callable[[], str]]
"""A name, and what is done. It returns what was seen, and raises if it is not as it must be."""


class Checks:
    """They are called in turn: later ones use the runs of earlier ones."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal = rehearsal
        self.run_id = ""
        """Of the run that the target trained first."""
        self.here = ""
        """Of one that this machine trained."""

    def all(self) -> Iterator[Check]:
        yield "target add", self.add
        yield "train --target", self.train
        yield "nodes see nothing of FLASH_HOME, secrets are nowhere", self.hide
        yield "evaluate", self.evaluate
        yield "checkpoints", self.checkpoints
        yield "warm start here from the target", self.start_here
        yield "warm start on the target from here", self.start_there
        yield "export", self.export
        yield "deploy, chat", self.deploy

    def add(self) -> str:
        found = self.rehearsal.add_target("lab")
        assert (found["version"], found["missing"]) == (__version__, []), found
        return ", ".join(found["devices"])

    def train(self) -> str:
        self.run_id = self.rehearsal.train("lab", eval_after="true")
        self.rehearsal.ended(self.run_id)
        [after] = self.rehearsal.store.evals(self.run_id)
        return f"2 steps, evaluation at step {after.step}"

    def hide(self) -> str:
        """A run with a secret, looked at while it waits for it and while it uses it."""
        more = {"secrets": '["PLANTED_KEY"]', "environment_args": "{needs_secret = true}"}
        run_id = self.rehearsal.train("lab", **more)
        looked_at = 0
        early, late = ("start", "secrets", "artifacts"), ("engine", "rollout", "train", "sync")
        for phases in (early, late, ()):
            self.rehearsal.until(lambda phases=phases: self._is_in(run_id, phases), f"{phases}")
            looked_at += self._look_for_leaks(run_id)
            self._look_from_the_node(run_id)
        self.rehearsal.ended(run_id)
        return f"{looked_at} objects, files, answers and command lines looked at"

    def _is_in(self, run_id: str, phases: tuple[str, ...]) -> bool:
        run = self.rehearsal.store.run(run_id)
        return run.ended is not None or (bool(phases) and str(run.phase).startswith(phases))

    def _look_for_leaks(self, run_id: str) -> int:
        """In how many places neither the planted value nor the store's key is found."""
        rehearsal = self.rehearsal
        listed = rehearsal.files.find(rehearsal.storage)
        found = dict(rehearsal.files.cat(listed, on_error="omit")) if listed else {}
        places = (rehearsal.cluster.folder, rehearsal.home / "attempts", rehearsal.folder / "node")
        for path in (path for place in places for path in place.rglob("*")):
            with suppress(OSError):  # folders, sockets, and files that are gone
                if path.is_file():
                    found[str(path)] = path.read_bytes()
        for process in psutil.process_iter(["cmdline"]):
            found[f"{process}"] = " ".join(process.info["cmdline"] or []).encode()
        found["log"] = rehearsal.store.log(run_id).encode()
        if rehearsal.engine == "ray":
            for path in ("jobs/", f"jobs/{run_id}-1", f"jobs/{run_id}-1/logs", "v0/actors?detail=1",
                         "v0/jobs?detail=1", "v0/workers?detail=1", "v0/runtime_envs"):  # fmt: skip
                found[path] = rehearsal.ask_ray(path).content
        values = (PLANTED.encode(), SECRET_KEY.encode())
        leaks = [name for name, body in found.items() if any(value in body for value in values)]
        assert not leaks, leaks
        return len(found)

    def _look_from_the_node(self, run_id: str) -> None:
        """The attempt's root has no file of the state directory."""
        run = self.rehearsal.store.run(run_id)
        for process in self.rehearsal.processes("worker.main", run):
            home = Path(f"/proc/{process.pid}/root{self.rehearsal.home.parent}")
            with suppress(FileNotFoundError, psutil.NoSuchProcess):
                assert not list(home.iterdir())

    def evaluate(self) -> str:
        words = [f"--model={self.run_id}", "--target=lab", "--limit=2", "--wait-s=0"]
        run_id = self.rehearsal.flash("evaluate", "vowels", *words)["run_id"]
        run = self.rehearsal.ended(run_id)
        assert run.target == "lab"
        return f"{self.rehearsal.store.evals(run_id)[0].summary['n']} tasks"

    def checkpoints(self) -> str:
        saved = self.rehearsal.flash("checkpoints", self.run_id)["checkpoints"]
        assert [each["step"] for each in saved] == [2, 1], saved
        assert all(each["path"].startswith(self.rehearsal.storage) for each in saved), saved
        return str(saved[0]["path"]).partition(self.run_id)[2]

    def start_here(self) -> str:
        self.here = self.rehearsal.train("local", init_from_adapter=self.run_id, steps=1)
        self.rehearsal.ended(self.here)
        return ""

    def start_there(self) -> str:
        run_id = self.rehearsal.train("lab", init_from_adapter=self.here, steps=1)
        adapter = self.rehearsal.ended(run_id).init_adapter
        assert adapter and adapter["run_id"] == self.here
        return ""

    def export(self) -> str:
        place = self.rehearsal.folder / "exported"
        words = [self.run_id, "--format", "adapter", "--to", str(place)]
        self.rehearsal.flash("export", *words)
        assert (place / "adapter_model.safetensors").is_file()
        return ""

    def deploy(self) -> str:
        flash = self.rehearsal.flash
        deployed: list[dict[str, object]] = []

        def is_ready() -> bool:
            deployed[:] = [flash("deploy", self.run_id)]
            assert deployed[0]["state"] in ("starting", "ready"), deployed
            return deployed[0]["state"] == "ready"

        self.rehearsal.until(is_ready, "the deployment")
        name = str(deployed[0]["deployment"])
        answer = flash("chat", "--deployment", name, "Write 1", "--max-tokens=8")
        flash("undeploy", name)
        return str(answer["adapter"]["finish"])


def removed(rehearsal: Rehearsal) -> str:
    """Remove every run; nothing is left in the bucket."""

    def is_removable() -> bool:
        return not rehearsal.store.deployments(("starting", "ready", "stopping"))

    rehearsal.until(is_removable, "the end of the deployments")
    names = [run.id for run in rehearsal.store.runs(limit=1000)]
    rehearsal.flash("remove", "--yes", *names)
    left = rehearsal.files.find(rehearsal.storage)
    assert not left, left[:5]
    return f"{len(names)} runs removed, the bucket is empty"
