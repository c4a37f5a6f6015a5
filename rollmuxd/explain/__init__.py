"""Why a job or a slot waits, what would let it start, and when it is likely to: answers for people."""
