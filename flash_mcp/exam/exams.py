"""What the operator does with exams: create, list, remove, unlock. The files of one:

exams/NAME/exam.json        what everybody may know: looks, owners, the number of tasks
exams/NAME/ID/exam.sealed   the environment's folder, encrypted
exams/NAME/prompts.sealed   what its tasks ask, encrypted"""

from __future__ import annotations

import asyncio
import json
import random
import secrets as randomness
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dotenv import dotenv_values

from environments.process.host import EnvironmentHost
from environments.same_task import task_of
from environments.sandbox.needs import Needs
from environments.settings import LOCAL_OWNER
from flash_mcp.exam import prompts
from flash_mcp.exam.prompts import folder_of
from flash_mcp.protocol import exams as sealing
from flash_mcp.protocol.errors import FlashError, did_you_mean, expanded
from flash_mcp.protocol.paths import write_private
from flash_mcp.protocol.records import EnvironmentVersion, Json
from flash_mcp.state.owners import caller
from flash_mcp.state.versions import check_name, folder_files, keep_generated
from flash_mcp.supervisor import process, secrets

FILE = "exam.json"
LEAST_TASKS = 10
"""Of a look."""
LEAST_CHARACTERS = 12
"""Of a passphrase."""
LOAD_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Exam:
    name: str
    id: str
    created: float
    looks: int
    """That each owner may take."""
    owners: list[str]
    """Who may look; all, if empty."""
    tasks: int
    order: list[int]
    """Places of the eval tasks, shuffled: each look takes the next of them."""
    salt: str | None = None
    """Of the passphrase."""
    key_file: str | None = None

    @property
    def variable(self) -> str:
        return sealing.variable_of(self.id)

    @property
    def per_look(self) -> int:
        return self.tasks // self.looks

    def slice(self, number: int) -> list[int]:
        """The tasks of a look, counted from 1: no other look of the owner has one of them."""
        return self.order[(number - 1) * self.per_look : number * self.per_look]

    def version(self, base: Path) -> EnvironmentVersion:
        """The sealed folder as a version that runs may name."""
        return EnvironmentVersion(
            owner=LOCAL_OWNER,
            name=f"{sealing.REFERENCE}{self.name}",
            digest=self.id,
            path=str(folder_of(base, self.name) / self.id),
            size_bytes=0,
            pushed=self.created,
            data={},
        )

    def key(self, passphrase: str | None = None) -> bytes:
        """FlashError(exam_locked) without what it is made from."""
        if self.salt:
            return sealing.key_of(passphrase or "", self.salt)
        try:
            return bytes.fromhex(dotenv_values(self.key_file)[self.variable] or "")
        except (OSError, KeyError, ValueError) as error:
            what = f"{self.key_file} cannot be read or is not the key file of exam {self.name}"
            fix = "let the account of the server read it"
            raise FlashError("exam_locked", what, fix=fix) from error


def exams(base: Path) -> list[Exam]:
    """All exams, for the operator; those that they may take, for another owner."""
    result: list[Exam] = []
    for path in sorted((base / "exams").glob(f"[!.]*/{FILE}")):
        exam = Exam(**json.loads(path.read_text()))
        if caller().is_local or not exam.owners or caller().owner in exam.owners:
            result.append(exam)
    return result


def find_exam(base: Path, name: str) -> Exam:
    """FlashError(unknown_exam), also for one that the caller may not take."""
    existing = {exam.name: exam for exam in exams(base)}
    if name in existing:
        return existing[name]
    what = f"there is no exam {name!r:.100}{did_you_mean(name, existing)}"
    fix = "the operator makes one with `flash-mcp exam create NAME FOLDER --looks N`"
    if existing:
        fix = f"use one of: {', '.join(f'{sealing.REFERENCE}{each}' for each in existing)}"
    raise FlashError("unknown_exam", what, fix=fix)


def create(
    base: Path,
    name: str,
    folder: Path,
    *,
    looks: int,
    owners: Sequence[str] = (),
    passphrase: str | None = None,
    key_file: Path | None = None,
) -> Exam:
    """Seal a folder. The folder itself stays where it is, for the operator to keep elsewhere.

    FlashError(invalid_argument | upload_invalid | environment_*)."""
    place = folder_of(base, check_name(name))
    if (place / FILE).exists():
        fix = "use another name, or `flash-mcp exam remove` first"
        raise FlashError("invalid_argument", f"there is an exam {name!r} already", fix=fix)
    if passphrase is not None and len(passphrase) < LEAST_CHARACTERS:
        what = f"the passphrase has fewer than {LEAST_CHARACTERS} characters"
        raise FlashError("invalid_argument", what, fix="use several words")
    files: dict[str, bytes] = {}
    for path, source in folder_files(folder).items():
        files[path] = source if isinstance(source, bytes) else source.read_bytes()
    if Needs.from_folder(expanded(folder)).gateway:
        what = "agents outside would see the tasks: an exam cannot be played through a gateway"
        raise FlashError("invalid_argument", what, fix="leave gateway out of environment.toml")
    with tempfile.TemporaryDirectory(prefix="flash-exam-") as plain:
        sealing.unpack(sealing.pack(files), Path(plain))
        texts, generated = asyncio.run(_look_into(Path(plain), name))
        keep_generated(Path(plain), generated)
        for path in Path(plain).glob(".kept/*"):
            files[path.relative_to(plain).as_posix()] = path.read_bytes()
    if not 1 <= looks <= len(texts) // LEAST_TASKS:
        most = len(texts) // LEAST_TASKS
        what = f"{looks} looks need {looks * LEAST_TASKS} eval tasks, {LEAST_TASKS} for each: "
        what += f"each look takes tasks that no other took, and the folder has {len(texts)}"
        fix = f"use --looks {most} or fewer" if most else "add eval tasks"
        raise FlashError("invalid_argument", what, looks=looks, fix=fix)
    order = list(range(len(texts)))
    random.SystemRandom().shuffle(order)
    exam_id, salt = randomness.token_hex(8), None
    if key_file:
        path = expanded(key_file).absolute()
        key = randomness.token_bytes(32)
        if path.exists():
            what = f"{path} exists, and would be overwritten"
            raise FlashError("invalid_argument", what, fix="name a file that is not there yet")
        write_private(path, f"{sealing.variable_of(exam_id)}={key.hex()}\n")
        key_file = path
    else:
        salt = randomness.token_hex(sealing.SALT_BYTES)
        key = sealing.key_of(passphrase or "", salt)
    about = (name, exam_id, time.time(), looks, sorted(owners), len(texts), order, salt)
    exam = Exam(*about, str(key_file) if key_file else None)
    (place / exam_id).mkdir(parents=True, mode=0o700)
    sealed = sealing.seal(key, sealing.pack(files), exam_id)
    write_private(place / exam_id / sealing.SEALED, sealed)
    sealed = sealing.seal(key, json.dumps(texts).encode(), f"{exam_id} prompts")
    write_private(place / sealing.PROMPTS, sealed)
    write_private(place / FILE, json.dumps(vars(exam)))  # last: until then there is no exam
    return exam


async def _look_into(folder: Path, name: str) -> tuple[list[str], dict[str, str]]:
    """What the eval tasks ask, and the tasks that loading generated."""
    # It loads the tools, for which no other command has to wait.
    from flash_mcp.tools.shared.loading import hosted  # noqa: PLC0415

    fix = "correct the folder; env_test examines it"
    timeouts = {"timeout_s": LOAD_TIMEOUT_S, "start_timeout_s": LOAD_TIMEOUT_S}
    async with hosted(folder, name, known_as=name, fix=fix, **timeouts) as host:
        return await _prompts(host), await host.generated()


async def _prompts(host: EnvironmentHost) -> list[str]:
    texts: list[str] = []
    for index in range(host.splits.get("eval", 0)):
        opening = await host.open("eval", index)
        texts.append(task_of(opening.messages).text)
        await host.close(opening.episode)
    return texts


def remove(base: Path, name: str) -> None:
    """Runs that took it keep their totals."""
    shutil.rmtree(folder_of(base, find_exam(base, name).name))


def unlock(base: Path, name: str, passphrase: str) -> None:
    """Hand the key to the supervisor, which keeps it in memory until it ends.
    FlashError(exam_locked).
    """
    exam = find_exam(base, name)
    key = exam.key(passphrase)
    prompts.read(base, name, exam.id, key)
    process.ensure_supervisor(base)
    secrets.give(base, secrets.EXAMS, {exam.variable: key.hex()})


def lock(base: Path, name: str) -> None:
    """Let the supervisor forget the key."""
    secrets.give(base, secrets.EXAMS, {find_exam(base, name).variable: ""})


# -- how many training rows ask what an exam asks --------------------------------------------------
# Only the number is told. For one with a passphrase the supervisor searches: it alone has its key.

AT_ONCE = 50
"""Texts of a request to the supervisor."""


def rows_by_exam(base: Path, questions: Iterable[str]) -> dict[str, int | None]:
    """Rows by the caller's exams whose tasks they ask; None for an exam that is locked. Without an
    exam nothing of `questions` is computed."""
    result: dict[str, int | None] = {}
    available = exams(base)
    texts = list(questions) if available else []
    for exam in available:
        number: int | None = 0
        for start in range(0, len(texts), AT_ONCE):
            part = [text[: prompts.CHARACTERS] for text in texts[start : start + AT_ONCE]]
            try:
                if exam.key_file:
                    number += prompts.rows(base, exam.name, exam.id, exam.key(), part)
                else:
                    number += secrets.count_rows(base, exam.name, exam.id, part)
            except FlashError:
                number = None
                break
        result[exam.name] = number
    return result


def questions_of(rows: Iterable[Json]) -> Iterator[str]:
    """What rows of a dataset ask."""
    for row in rows:
        yield task_of(row["messages"][: row["prompt_messages"]]).text


def notes(rows: Mapping[str, int | None]) -> list[str]:
    """What `rows_by_exam` found, in words."""
    result: list[str] = []
    for name, number in rows.items():
        if number is None:
            result.append(f"exam:{name} is locked: the rows were not searched for its tasks")
        elif number:
            what = f"CONTAMINATED: {number} rows ask what exam:{name} asks"
            result.append(f"{what}, so it says little of a model that learns from them")
    return result
