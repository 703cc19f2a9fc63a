from pathlib import Path

import pytest

from environments.settings import FILE, EnvironmentSettings, Settings, identity, load_settings


def test_without_a_file_every_setting_has_its_default(tmp_path: Path) -> None:
    assert load_settings(tmp_path) == Settings()


def test_a_changed_file_holds_at_the_next_reading(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('[environments]\nnetwork = ["search"]\n')
    assert load_settings(tmp_path).environments.network == ("search",)
    (tmp_path / FILE).write_text('[environments]\nnetwork = ["*"]\n')
    assert load_settings(tmp_path).environments.network == ("*",)


def test_a_grant_names_the_owner_except_the_local_one() -> None:
    granted = EnvironmentSettings(network=("search", "bob/browse"))
    names = [("local", "search"), ("bob", "search"), ("bob", "browse"), ("local", "browse")]
    assert [granted.grants_network(identity(*name)) for name in names] == [True, False, True, False]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[environments", "settings.toml cannot be read"),
        ("[environment]\n", "unknown keys environment; it may have: environments"),
        ("environments = 3\n", "environments must be a table, got 3"),
        ("[environments]\nnetwrok = []\n", "environments has unknown keys netwrok"),
        ("[environments]\nnetwork = true\n", "network must be a list of texts, got True"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=named):
        load_settings(tmp_path)
