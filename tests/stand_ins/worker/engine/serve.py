"""tests.scripted_server in the place of vLLM's: a server that ends when its engine process does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[4]))


def main() -> None:
    start = subprocess.Popen

    def start_watched(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        engine = start(*arguments, **options)
        threading.Thread(target=lambda: (engine.wait(), os._exit(1)), daemon=True).start()
        return engine

    subprocess.Popen = start_watched
    from tests.scripted_server import main as serve  # noqa: PLC0415

    serve()


if __name__ == "__main__":
    main()
