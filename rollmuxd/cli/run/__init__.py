"""``rollmuxd run``: the commands of a job, started when it has its place."""
