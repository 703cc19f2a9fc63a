"""A process whose clock goes ahead."""

import json
import subprocess
import sys

import pytest

CODE = """
import datetime, json, pickle, time
from datetime import date, datetime as early
from environments.process.clock import shift_clock
before = time.time()
shift_clock(400 * 86400)
now = datetime.datetime.now()
assert isinstance(now, datetime.datetime) and isinstance(now, early)
assert pickle.loads(pickle.dumps(now)) == now
assert datetime.datetime(2020, 1, 2).isoformat() == "2020-01-02T00:00:00"
assert datetime.datetime.fromisoformat("2020-01-02").year == 2020
assert datetime.datetime.strptime("2020", "%Y") == early(2020, 1, 1)
readings = [
    time.time(), time.time_ns() / 1e9, time.mktime(time.localtime()), now.timestamp(),
    datetime.datetime.utcnow().replace(tzinfo=datetime.UTC).timestamp(),
    datetime.datetime.now(datetime.UTC).timestamp(), datetime.datetime.today().timestamp(),
    time.mktime(time.strptime(time.ctime())), time.mktime(time.strptime(time.asctime())),
    time.mktime(time.strptime(time.strftime("%Y-%m-%d %H:%M:%S"), "%Y-%m-%d %H:%M:%S")),
]
assert date.today() == now.date()
assert time.localtime(0).tm_year in (1969, 1970) and time.strftime("%Y", time.gmtime(0)) == "1970"
print(json.dumps([reading - before for reading in readings]))
"""


def test_every_clock_of_python_goes_ahead() -> None:
    command = [sys.executable, "-W", "ignore", "-c", CODE]
    shifts = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert len(shifts) == 10
    assert all(400 * 86400 - 2 < shift < 400 * 86400 + 60 for shift in shifts), shifts


@pytest.mark.slow
def test_compiled_modules_extend_the_real_datetime() -> None:
    pytest.importorskip("pandas")
    code = """
import datetime
from environments.process.clock import shift_clock
shift_clock(400 * 86400)
import pandas
assert pandas.Timestamp("2020-01-02").year == 2020 and pandas.isna(pandas.NaT)
assert (datetime.datetime.now() - pandas.Timestamp.now().to_pydatetime()).days in (399, 400)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)
