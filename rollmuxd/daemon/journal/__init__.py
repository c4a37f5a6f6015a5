"""The journal: one SQLite file with every fact, snapshots of the state, backups and retention."""
