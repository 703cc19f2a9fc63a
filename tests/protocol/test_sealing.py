"""Secrets that travel through a storage: only the attempt that asked for them can read them."""

import json

import pytest

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.sealing import Receiver, seal

TOKEN = "0123456789abcdef"
VALUES = {"API_KEY": "pl4nted-sécret"}


def test_sealed_values_are_read_by_the_attempt_that_asked_for_them_alone() -> None:
    receiver = Receiver("run-1-1", TOKEN)
    sealed = seal(VALUES, json.loads(json.dumps(receiver.offer)), "run-1-1", TOKEN)
    assert b"pl4nted" not in sealed
    assert receiver.open(sealed) == VALUES
    for other in (Receiver("run-1-1", TOKEN), Receiver("run-1-2", TOKEN)):
        with pytest.raises(FlashError, match="cannot be opened") as caught:
            other.open(sealed)
        assert caught.value.code == "secret_missing"
    for damaged in (sealed[:-1], b"", bytes([sealed[0] ^ 1]) + sealed[1:]):
        with pytest.raises(FlashError, match="cannot be opened"):
            receiver.open(damaged)


@pytest.mark.parametrize("name", ["run-1-1", "run-1-2"])
def test_nothing_is_sealed_for_a_key_that_the_attempt_did_not_make(name: str) -> None:
    forged = Receiver(name, "another token" if name == "run-1-1" else TOKEN).offer
    honest = Receiver("run-1-1", TOKEN).offer
    mixed = {**honest, "public": forged["public"]}
    for offer in (forged, mixed, {}):
        with pytest.raises(FlashError, match="that its attempt did not make"):
            seal(VALUES, offer, "run-1-1", TOKEN)
