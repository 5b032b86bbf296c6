"""All state on disk: artifacts and attempts as directories, an SQLite index of them, claims that die with their process."""
