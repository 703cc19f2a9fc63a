"""Tasks that are generated are kept with a version."""

from pathlib import Path
from typing import Any

import pytest

from environments import task_cache
from environments.faults import EnvironmentFault
from environments.process.host import EnvironmentHost
from flash_mcp.protocol.errors import FlashError
from flash_mcp.state.store import open_store
from flash_mcp.state.versions import digest_of, folder_files, inline_files
from flash_mcp.tools.environments import env_push
from flash_mcp.tools.shared.loading import loaded
from tests.folders import generated_files


async def push(files: dict[str, str], **options: Any) -> Path:
    await env_push("numbers", files=files, **options)
    return Path(open_store().environment("numbers").path)


async def tasks_of(folder: Path, **args: Any) -> list[tuple[str, str]]:
    async with await EnvironmentHost.start(folder, args=args) as host:
        for split in host.splits:
            opening = await host.open(split, 1)
            [gold] = await host.gold(split, 1)
            await host.step(opening.episode, gold["content"])
            assert (await host.score(opening.episode)).success
        return [*await host.tasks("train"), *await host.tasks("eval")]


@pytest.mark.slow
async def test_a_pushed_version_has_the_same_tasks_at_every_load() -> None:
    files = generated_files()
    folder = await push(files)
    tasks = await tasks_of(folder)
    assert len(tasks) == 8 and await tasks_of(folder) == tasks
    assert (await env_push("numbers", files=files)).created is False and await tasks_of(folder) == tasks
    assert digest_of(folder) == folder.name and set(folder_files(folder)) == set(files)


@pytest.mark.slow
async def test_other_arguments_mean_other_tasks_which_the_next_load_keeps() -> None:
    folder = await push(generated_files(), load=False)
    one, other = await tasks_of(folder, seed=1), await tasks_of(folder, seed=1)
    assert not set(one) & set(other), "a version that nothing was kept with generates"
    version = open_store().environment("numbers")
    for seed in (1, 2):
        async with loaded(version, secrets=None, args={"seed": seed}, fix="") as host:
            first = await host.tasks("train")
        assert (await tasks_of(folder, seed=seed))[:6] == first


@pytest.mark.parametrize(
    "change",
    [
        "reasoning_gym.task_cache.MAX_BYTES = 900",
        "environment.dataset[2].record['metadata'] = object()",
        "environment.dataset[2].record['metadata'] = float('nan')",
        "record = environment.dataset[2].record; record['metadata'] = record",
        "environment.dataset[2].record['metadata'] = os.environ['KEY']",
    ],
    ids=["too large", "no literal", "not equal to itself", "endless", "holds a secret"],
)
async def test_rows_that_cannot_be_kept_are_generated(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "hunter2-hunter2")
    folder = await push(generated_files(source=f"import os\n{change}"), secrets=["KEY"])
    assert not (folder / task_cache.FOLDER).exists()


def test_no_more_than_the_limit_is_kept_and_no_file_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_cache, "MAX_BYTES", 10)
    task_cache.keep(tmp_path, {"one": "1\n2\n"})
    task_cache.keep(tmp_path, {"one": "3\n", "two": "4\n", "long": "1\n" * 5})
    found = {path.name: path.read_text() for path in (tmp_path / task_cache.FOLDER).iterdir()}
    assert found == {"one": "1\n2\n", "two": "4\n"}


async def test_damaged_rows_are_an_error_that_names_the_file() -> None:
    folder = await push(generated_files())
    [file] = (folder / task_cache.FOLDER).iterdir()
    file.chmod(0o600)
    file.write_text("('train', __import__('os').getpid())\n")
    with pytest.raises(EnvironmentFault, match=f"{file.name} are damaged; remove this file"):
        await EnvironmentHost.start(folder)


def test_a_push_holds_no_rows_of_its_own() -> None:
    with pytest.raises(FlashError, match="is where generated tasks are kept"):
        inline_files({"environment.py": "", f"{task_cache.FOLDER}/0123": "1"})
