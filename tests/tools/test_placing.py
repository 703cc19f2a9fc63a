"""target="auto": which place a run gets, and what it says about that."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flash_mcp.protocol import base_models
from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.paths import home
from flash_mcp.state import queue
from flash_mcp.state.store import open_store
from flash_mcp.state.targets import new_target, write_target
from flash_mcp.supervisor.launch.devices import Device, MemoryNeed, memory_need
from flash_mcp.tools.registry import TOOLS
from flash_mcp.tools.shared.placing import Place, choose
from tests.samples import push_echo, supervised


def card(gib: float, kind: str = "gpu") -> Device:
    return Device(kind, f"a card of {gib:g}", gib, gib)


HERE = Place("local", card(64, "cpu"))
SMALL = Place("small", card(16), price_per_hour=0.4)
MIDDLE = Place("middle", card(24), price_per_hour=0.8)
LARGE = Place("large", card(80), price_per_hour=1.9, count=8)
DEAR = Place("dear", card(80), price_per_hour=3.2)
OWN = Place("own", card(80))
UNKNOWN = Place("unknown", None)


def full(place: Place) -> Place:
    return Place(place.name, place.cards, place.count, place.price_per_hour, is_full=True)


CASES = [
    # Billions of parameters, cards, places, the one that is chosen
    (0.5, 1, [HERE, DEAR, SMALL, LARGE], "small"),  # the cheapest
    (4, 1, [HERE, DEAR, SMALL, LARGE, MIDDLE], "middle"),  # the cheapest that holds it
    (8, 1, [HERE, MIDDLE, DEAR, LARGE], "large"),
    (8, 1, [HERE, DEAR, LARGE, OWN], "own"),  # without a price it costs nothing
    (8, 1, [HERE, DEAR, full(LARGE)], "dear"),  # no room
    (8, 1, [HERE, full(DEAR), full(LARGE)], "large"),  # none has room: not a processor
    (0.5, 4, [HERE, SMALL, DEAR, LARGE], "large"),  # four cards
    (8, 1, [HERE, SMALL], "local"),  # a processor, as no card holds it
    (0.5, 1, [HERE, Place("lab", card(64, "cpu"))], "local"),  # as cheap elsewhere
    (0.5, 1, [full(HERE), Place("lab", card(64, "cpu"), price_per_hour=1)], "lab"),
    (0.5, 1, [UNKNOWN, DEAR], "dear"),
    (None, 1, [HERE, SMALL, DEAR], "small"),  # nobody knows how large it is
    (0.5, 1, [Place("local", card(8), trouble="vllm is missing"), DEAR], "dear"),
]


def need_of(billions: float | None, device: Device) -> MemoryNeed | None:
    name = f"someone/model-{billions}B" if billions else "someone/model"
    return memory_need(base_models.find(name), device, has_engine=True)


@pytest.mark.parametrize(("billions", "cards", "places", "wanted"), CASES)
def test_the_cheapest_place_that_holds_the_model_and_has_room_is_chosen(
    billions: float | None, cards: int, places: list[Place], wanted: str
) -> None:
    target, why = choose(places, lambda device: need_of(billions, device), cards)
    assert target == wanted and why.startswith(f"target=auto chose {wanted}: ")
    assert all(place.name in why for place in places)


def test_what_no_place_can_take_is_refused_with_the_reason_of_each() -> None:
    with pytest.raises(FlashError) as caught:
        choose([SMALL, MIDDLE, UNKNOWN], lambda device: need_of(32, device))
    assert caught.value.code == "device_unsupported"
    assert "small: 119.2 GiB of weights exceed 85% of 16 GiB of a card of 16" in caught.value.what
    assert "unknown: its cards are not known: `flash-mcp target check unknown`" in caught.value.what


@pytest.fixture
def lab_and_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine is dear and small; `near` costs less than `lab`, and has one slot."""
    push_echo(tmp_path / "echo")
    base = home()
    (base / "settings.toml").write_text('[cost]\nprice_per_hour = 9.0\ncurrency = "EUR"\n')
    for name, price in (("lab", 1.9), ("near", 0.8)):
        cards = {"name": "a card", "memory_gib": 16.0}
        fields = {"engine": "slurm", "storage": str(tmp_path), "slots": 1, "cards": cards}
        write_target(base, name, new_target(base, name, {**fields, "price_per_hour": price}))
    monkeypatch.setattr("flash_mcp.tools.shared.placing.gpus", list[Device])
    with supervised():
        yield


async def call(tool: str, **arguments: Any) -> Any:
    return await TOOLS[tool].function(environment="echo", target="auto", **arguments)


@pytest.mark.slow
@pytest.mark.usefixtures("lab_and_near")
async def test_train_and_evaluate_go_to_the_next_target_once_the_cheapest_is_full() -> None:
    first = await call("train", steps=3, idempotency_key="k")
    assert first.values["target"] == "near" and first.sources["auto"] == ["target"]
    why = next(note for note in first.notes if note.startswith("target=auto chose near: 0.8 an"))
    assert "16 GiB of a card" in why and "lab (1.9 an hour" in why and "local (9 an hour" in why

    second = await call("train", steps=3)
    assert second.values["target"] == "lab"
    assert any("near (0.8 an hour, 16 GiB of a card, full)" in note for note in second.notes)
    # The key finds the run where it went first, although another target is the best by now.
    again = await call("train", steps=3, idempotency_key="k")
    assert (again.run_id, again.created, again.values["target"]) == (first.run_id, False, "near")

    store = open_store()
    queue.request_cancel(store, second.run_id)
    measured = await call("evaluate", limit=2, wait_s=0)
    assert store.run(measured.run_id).target == "lab"
    assert measured.notes[0].startswith("target=auto chose lab: ")


@pytest.mark.slow
@pytest.mark.usefixtures("lab_and_near")
async def test_a_target_whose_engine_lets_a_run_wait_has_no_room() -> None:
    first = await call("train", steps=3)
    store = open_store()
    text = (store.base / "targets.toml").read_text()
    (store.base / "targets.toml").write_text(text.replace("slots = 1", "slots = 5"))
    claimed = queue.claim(store, target="near")
    assert claimed and claimed.id == first.run_id
    assert (await call("train", validate_only=True)).values["target"] == "near"
    queue.record_wait(store, claimed.id, claimed.attempt, "Resources")
    assert (await call("train", validate_only=True)).values["target"] == "lab"


@pytest.mark.usefixtures("lab_and_near")
@pytest.mark.needs("engines")
async def test_a_server_without_training_packages_trains_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("placing", "loading"):
        monkeypatch.setattr(f"flash_mcp.tools.shared.{module}.missing_packages", lambda: ["torch", "vllm"])
    (home() / "settings.toml").unlink()  # without a price this machine would be the cheapest
    chosen = await call("train", steps=3)
    assert chosen.values["target"] == "near"
    assert any("not local (not installed here: torch, vllm)" in note for note in chosen.notes)
    assert (await TOOLS["train"].function(environment="echo", target="lab")).state == "queued"
    with pytest.raises(FlashError, match="engine_missing"):
        await TOOLS["train"].function(environment="echo", target="local")
    with pytest.raises(FlashError, match=r"engine_missing.*--lora-modules"):
        await TOOLS["deploy"].function(run_id=chosen.run_id)


@pytest.mark.slow
@pytest.mark.usefixtures("lab_and_near")
async def test_a_run_whose_agents_are_outside_is_refused_where_they_do_not_reach_it(tmp_path: Path) -> None:
    (tmp_path / "echo" / "environment.toml").write_text("gateway = true\n")
    pushed = await TOOLS["env_push"].function(folder=str(tmp_path / "echo"), name="outside")
    for tool in ("train", "evaluate"):
        with pytest.raises(FlashError, match=r'do not reach one on near.*use target="local"') as caught:
            await TOOLS[tool].function(environment=pushed.environment, target="near")
        assert caught.value.code == "invalid_argument"
    validated = await TOOLS["train"].function(environment=pushed.environment, validate_only=True)
    assert any("flash-mcp gateway RUN_ID -- PROGRAM" in note for note in validated.notes)


@pytest.mark.slow
@pytest.mark.usefixtures("lab_and_near")
async def test_an_evaluation_is_of_the_version_that_it_names(tmp_path: Path) -> None:
    evaluate = TOOLS["evaluate"].function
    old = open_store().environment("echo").reference
    newer = shutil.copytree(tmp_path / "echo", tmp_path / "newer")
    (newer / "environment.toml").write_text("gateway = true\n")
    new = (await TOOLS["env_push"].function(folder=str(newer), name="echo")).environment
    first = await evaluate(environment=old, idempotency_key="k", wait_s=0)
    with pytest.raises(FlashError, match="idempotency_conflict"):
        await evaluate(environment=new, idempotency_key="k", wait_s=0)
    assert (await evaluate(environment=old, idempotency_key="k", wait_s=0)).run_id == first.run_id
    # Agents outside do not reach a target, which is a matter of the newer version only.
    elsewhere = await evaluate(environment=old, target="near", again=True, wait_s=0)
    assert open_store().run(elsewhere.run_id).environment_reference == old
