from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "vllm", "transformers", "trl", "peft", "datasets", "worker", "ray"}
SHARED = {"flash_mcp", *(f"flash_mcp.{name}" for name in ("spec", "runfolder", "errors", "home", "callers", "catalog"))}


def loaded_by(module: str) -> set[str]:
    """What a fresh process has imported after `import module`."""
    code = f"import json, sys; old = {{*sys.modules}}; import {module}; print(json.dumps([*({{*sys.modules}} - old)]))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=250
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def modules_of(package: str) -> list[str]:
    paths = sorted(path.relative_to(ROOT).with_suffix("") for path in (ROOT / package).rglob("*.py"))
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_the_control_plane_loads_neither_the_training_side_nor_its_packages():
    code_of_all = ", ".join(name for name in modules_of("flash_mcp") if not name.endswith("__main__"))
    assert "flash_mcp.server" in code_of_all
    assert not roots(loaded_by(code_of_all)) & HEAVY


def test_environments_load_nothing_but_the_standard_library_and_themselves():
    contract = ", ".join(name for name in modules_of("environments") if name.count(".") < 2)
    assert roots(loaded_by(contract)) <= {"environments", *sys.stdlib_module_names}


def test_the_worker_loads_of_the_control_plane_only_the_protocol():
    loaded = loaded_by(", ".join(modules_of("worker")))
    assert "worker.main" in loaded
    assert {name for name in loaded if name.partition(".")[0] == "flash_mcp"} <= SHARED


def test_the_server_is_importable_fast():
    code = "import time; start = time.perf_counter(); import flash_mcp.server; print(time.perf_counter() - start)"
    seconds = min(
        float(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    )
    print(f"import flash_mcp.server: {seconds:.2f} s")  # noqa: T201
    assert seconds < 5  # under 1.5 s on a quiet machine, most of it the MCP SDK; clients give a server 10 s to start


def test_plotting_is_loaded_only_when_something_is_drawn():
    assert not roots(loaded_by("flash_mcp.server, flash_mcp.cli, flash_mcp.curve")) & {"matplotlib", "plotext", "numpy"}
