"""The SQLite file that remembers which program and module sat where, and when."""
