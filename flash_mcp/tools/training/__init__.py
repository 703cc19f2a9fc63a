"""What train alone needs: how a run is checked, estimated and queued."""
