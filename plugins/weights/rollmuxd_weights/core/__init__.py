"""The pure part: what a version is, what is newer, what to fetch next, and how a difference is written."""
