"""What lives on when a client leaves: the supervisor, its launchers, the model servers."""
