"""The sandbox of environment code: namespaces, Landlock, seccomp, limits, and its warden."""
