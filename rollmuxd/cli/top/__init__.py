"""``rollmuxd top``: pools, jobs and what waits, as they change."""
