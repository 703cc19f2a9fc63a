"""Certificates: what they say, that they hold for the files and the key they name, and that nothing
in them acts."""

import asyncio
import json
import shutil
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from environments.checks import gate
from flash_mcp.cli import main
from flash_mcp.extensions.certificate import command, signing
from flash_mcp.extensions.pages import live
from flash_mcp.protocol.errors import FlashError
from flash_mcp.state.store import open_store
from flash_mcp.tools.catalog import catalog
from flash_mcp.tools.environments import env_push
from tests.extensions.pages.test_report import HOSTILE, Tags
from tests.places import CALCULATOR
from tests.scripted_supervisor import scripted

PASSED = [{"name": name, "evidence": "fine"} for name in ("loads", *gate.FIRST, *gate.PROBES, gate.HUNT, "time")]
NO_RUN = {"trouble": "there was no run: --steps 0"}


def facts(probes: Any = PASSED, run: Any = NO_RUN, versions: Any = None, **checks: Any) -> dict[str, Any]:
    about = {"name": "echo", "digest": "0123456789abcdef", "arguments": {}}
    body: dict[str, Any] = {"format": 1, "made": "2026-01-02 03:04", "environment": about, "seconds": {"checks": 1.0}}
    body |= {"checks": {"passed": True, "probes": probes, **checks}, "sample": {}, "tasks": {}, "run": run}
    body["versions"] = {"requirements": [], "environment.toml": {}, **(versions or {})}
    return {**body, "questions": command.answers(body)}


def signed(body: dict[str, Any] | None = None) -> signing.Certificate:
    body = body or facts()
    return signing.sign(body, command.page_of(body), Ed25519PrivateKey.generate())


def failing(name: str) -> list[dict[str, Any]]:
    return [*(row for row in PASSED if row["name"] != name), {"name": name, "result": "failed", "evidence": "it pays"}]


def of_run(outcome: str | None = None, state: str = "succeeded", **more: Any) -> dict[str, Any]:
    verdict = {"verdict": {"outcome": outcome, "explanation": "0.1 to 0.9"}} if outcome else {}
    return {"run_id": "run-1", "state": state, "step": 20, "steps": 20, "model": "small", **verdict, **more}


# -- the answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "question", "answer", "why"),
    [
        (facts(), "not hackable", "yes", "junk"),
        (facts(failing("near_gold")), "not hackable", "no", "near_gold: it pays"),
        (facts(failing("best_of_n")), "not hackable", "no", "best_of_n: it pays"),
        (facts([row for row in PASSED if row["name"] != gate.HUNT]), "not hackable", "not measured", "hunt: not made"),
        (facts([{**PASSED[0], "result": "open"}]), "secure", "not measured", "loads: fine"),
        (facts([], trouble="[not_ready] no time"), "reproducible", "not measured", "determinism: [not_ready] no time"),
        (facts(sandbox="network: missing"), "secure", "not measured", "network: missing"),
        (facts(versions={"environment.toml": {"network": True}}), "secure", "no", "asks for network"),
        (facts(versions={"environment.toml": {"memory_gib": 9}}), "secure", "yes", "loads"),
        (facts(versions={"requirements": ["a==1", "b @ https://x", "c===2; a>1"]}), "reproducible", "yes",
         "determinism"),
        (facts(versions={"requirements": ["a==1", "b>=2", "c==1.*", "d"]}), "reproducible", "no", "b>=2, c==1.*, d"),
        (facts(failing("gold")), "self-describing", "no", "gold: it pays"),
        (facts(), "learnable", "not measured", "--steps 0"),
        (facts(run=of_run("improved")), "learnable", "yes", "20 steps of small: 0.1 to 0.9"),
        (facts(run=of_run("underpowered")), "learnable", "not measured", "0.1 to 0.9"),
        (facts(run=of_run("no_change")), "learnable", "no", "0.1 to 0.9"),
        (facts(run=of_run("contaminated")), "learnable", "no", "0.1 to 0.9"),
        (facts(run=of_run("improved", "cancelled")), "learnable", "not measured", "the run cancelled after 20 steps"),
        (facts(run=of_run(state="failed", error={"what": "killed"})), "learnable", "not measured", "killed"),
    ],
)  # fmt: skip
def test_an_answer_is_yes_no_or_not_measured_and_says_why(body: Any, question: str, answer: str, why: str) -> None:
    row = body["questions"][question]
    assert row["answer"] == answer and why in row["because"]


def test_every_check_of_an_environment_decides_an_answer() -> None:
    decided = {*command.OTHERS, *(name for needed in command.NEEDED.values() for name in needed)}
    assert {row["name"] for row in PASSED} | {"files", "best_of_n"} == decided


# -- the signature ---------------------------------------------------------------------------------


def altered(text: str, **fields: Any) -> str:
    return json.dumps(json.loads(text) | fields)


OTHER = facts(failing("junk"))
ATTACKS = {
    "an answer in the page": lambda one: one.page.replace("fine", "good", 1),
    "a fact in the page's JSON": lambda one: one.page.replace('"evidence": "fine"', '"evidence": "good"', 1),
    "the page of other facts": lambda one: command.page_of(OTHER).replace("</body>", f"{block(one)}</body>"),
    "a second block": lambda one: one.page.replace("</body>", f"{block(one)}</body>"),
    "a fact": lambda one: altered(one.text, certificate=OTHER),
    "another page": lambda one: altered(one.text, page_sha256="0" * 64),
    "another key": lambda one: altered(one.text, public_key=json.loads(signed().text)["public_key"]),
    "a field more": lambda one: altered(one.text, note="trust me"),
    "a field twice": lambda one: one.text.replace("{", '{"page_sha256": "",', 1),
    "a field twice, deep": lambda one: one.text.replace('"name": "echo"', '"name": "echo", "name": "echo"', 1),
    "no signature": lambda one: altered(one.text, signature=""),
    "a signature that is no text": lambda one: altered(one.text, signature=1),
    "a key of another kind": lambda one: altered(one.text, public_key="ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAAQ=="),
    "half of it": lambda one: one.text[: len(one.text) // 2],
    "a list": lambda one: "[]",
    "depth": lambda one: "[" * 100_000,
    "nothing": lambda one: "",
}


def block(one: signing.Certificate) -> str:
    match = signing.BLOCK.search(one.page)
    assert match
    return match[0]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_certificate_that_was_changed_is_refused(attack: str) -> None:
    with pytest.raises(FlashError, match="certificate_invalid"):
        signing.read(ATTACKS[attack](signed()).encode())


def test_a_signature_of_the_same_text_for_another_purpose_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signing, "CONTEXT", b"")
    one = signed()
    monkeypatch.undo()
    with pytest.raises(FlashError, match="changed after it was signed"):
        signing.read(one.page.encode())
    with pytest.raises(FlashError, match="cannot be read"):
        signing.read(b"\xff\xfe")


def test_what_an_environment_says_acts_on_no_page_and_can_be_verified() -> None:
    text = f"{HOSTILE}</body></script>\r\n\ud800"
    probes = [*PASSED, {"name": text, "evidence": text, "result": "failed", "fix": text}]
    one = signed(facts(probes, run=of_run(state="failed", error={"what": text}), trouble=text))
    tags = [tag for tag, _ in Tags(one.page).found]
    assert "img" not in tags and tags.count("script") == 1 and one.page.count("</body>") == 1
    assert signing.read(one.page.encode()).facts == one.facts == signing.read(one.text.encode()).facts


# -- keys ------------------------------------------------------------------------------------------


def test_the_key_is_made_once_for_this_user_alone(flash_home: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda _: signing.signing_key(), range(8)))
    assert len({signing.fingerprint(key.public_key()) for key in keys}) == 1
    (path,) = flash_home.glob("*certificate.key*")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [None, b"", b"no key", b"-----BEGIN OPENSSH PRIVATE KEY-----\n"])
def test_a_key_that_cannot_be_used_is_refused_with_how_to_make_one(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(FlashError, match="ssh-keygen -t ed25519"):
        signing.signing_key(tmp_path / "key")


# -- the command -----------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main.main(["certify", *map(str, words)]) == code
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [(), ("echo", "--steps", "-1"), ("echo", "--environment-args", "[1]"), ("exam:a",)])
def test_what_cannot_be_certified_is_refused_before_anything_runs(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["certify", *words]) in (1, 2)
    assert capsys.readouterr().err.startswith(("[invalid_argument] it takes", "[exam_sealed"))


@pytest.mark.slow
def test_a_certificate_is_kept_shown_and_verified_for_the_files_that_it_is_about(
    flash_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(shutil.copytree(CALCULATOR, "calculator"))
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    printed = run(capsys, "./calculator", "--steps", "0", "--key", key)
    assert "not hackable: yes (passed: junk" in printed and "learnable: not measured" in printed
    page = Path("calculator-certificate.html")
    (version,) = open_store().environments()
    line = signing.line_of(version)
    assert line and catalog().environments[0].certificate == line == str(signing.read(page.read_bytes()))
    assert signing.kept_page(open_store(), "calculator") == page.read_text()
    assert f'href="/ui/certificates/{version.reference}"' in live.overview(open_store(), "", live.Listing())

    with ThreadPoolExecutor(1) as pool:  # away from this thread's loop
        assert pool.submit(asyncio.run, env_push("again", folder="calculator")).result().certificate == line
        (folder / "environment.py").write_text((folder / "environment.py").read_text() + "# changed\n")
        assert pool.submit(asyncio.run, env_push("calculator", folder="calculator")).result().certificate is None

    listed = subprocess.run(["ssh-keygen", "-lf", key], check=True, capture_output=True, text=True).stdout
    signer = listed.split()[1]
    verified = json.loads(run(capsys, "--verify", page, "--signer", signer, "--json", version.reference))
    assert (verified["signed_by"], verified["is_own_key"], verified["valid"]) == (signer, False, "facts and page")
    assert "JSON has no page" in run(capsys, "--verify", page.with_suffix(".json"), "--key", key)
    for words in ([page, "calculator"], [page, "--signer", "SHA256:other"], [folder / "environment.py"]):
        run(capsys, "--verify", *words, code=1)
    run(capsys, code=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "state", "attempt"),
    [({"1": {"at": 2, "do": "kill"}}, "succeeded", "2 of 3"), ({"1": {"at": 2, "do": "fail"}}, "failed", None)],
)
def test_a_run_that_was_killed_goes_on_and_one_that_failed_for_good_is_named_by_the_next(
    script: Any, state: str, attempt: str | None, flash_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(CALCULATOR, tmp_path / "calculator")
    source = (folder / "environment.py").read_text().replace("def load_environment()", "def load_environment(**script)")
    (folder / "environment.py").write_text(source)
    page = tmp_path / "page.html"
    words = [folder, "--to", page, "--steps", 3, "--environment-args", json.dumps(script)]
    with scripted(flash_home):
        run(capsys, *words)
        first = signing.read(page.read_bytes()).facts
        assert (first["run"]["state"], first["run"].get("attempt")) == (state, attempt)
        assert (
            first["sample"]["rewards, from tenth to tenth"] == ", ".join(["0"] * 11)
            and first["questions"]["learnable"]["answer"] == "not measured"
        )
        assert state in first["questions"]["learnable"]["because"] or state == "succeeded"
        if state == "failed":
            run(capsys, *words)
            again = signing.read(page.read_bytes()).facts["run"]
            assert again["run_id"] != first["run"]["run_id"]
            assert "the optimizer's state" in again["earlier_runs"].pop(first["run"]["run_id"])
            assert again["earlier_runs"] == first["run"]["earlier_runs"] == {}
