"""Environments written for other contracts, brought to this one. Their packages are imported where
they are needed.

freesolo: folders for that SDK run unchanged. reasoning_gym: its datasets by name. gym: objects with
reset and step."""
