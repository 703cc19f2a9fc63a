from pathlib import Path

written = Path("/app/largest.txt")
right = written.is_file() and written.read_text().strip() == "south.txt"
Path("/logs/verifier/reward.txt").write_text(str(int(right)))
