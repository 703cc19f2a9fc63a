from pathlib import Path

import pytest

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.run_files import read_adapter_config


def test_a_configuration_is_read(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    assert read_adapter_config(tmp_path, "r", "lora_alpha") == {"r": 8, "lora_alpha": 16}


@pytest.mark.parametrize(
    "text",
    [None, "", "{", "[]", "{}", '{"r": null}', '{"r": "many"}'],
    ids=["absent", "empty", "cut off", "a list", "no rank", "rank null", "rank a word"],
)
def test_an_adapter_without_a_readable_configuration_is_no_checkpoint(tmp_path: Path, text: str | None):
    if text is not None:
        (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(FlashError) as caught:
        read_adapter_config(tmp_path, "r")
    assert caught.value.code == "unknown_checkpoint"
    assert str(tmp_path) in str(caught.value) and "checkpoints lists" in str(caught.value.fix)
