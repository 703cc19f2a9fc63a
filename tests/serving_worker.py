"""A worker whose model servers are scripted (scripted_server.py) and start at once; run as worker.main is."""

from pathlib import Path

from worker import heartbeat, main, serving

if __name__ == "__main__":
    serving.COMMAND = ("-P", str(Path(__file__).with_name("scripted_server.py")))
    serving.START_S = 0.05
    serving.STOP_S = 1.0
    heartbeat.BEAT_EVERY_S = 0.1
    main.leave(main.main())
