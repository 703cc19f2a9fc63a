"""Print what the sandbox protects on this machine, as JSON, for the doctor.

python -m environments.sandbox.probe FOLDER SCRATCH
"""

import json
import sys

from environments.sandbox import warden
from environments.sandbox.needs import Bounds


def main() -> None:
    folder, scratch = sys.argv[1:]
    result = warden.enclose(Bounds(folder, scratch, hidden=folder, without_file_protection=True))
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
