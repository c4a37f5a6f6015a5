"""What follows from the facts: end slots, admit jobs, hand turns on, move, drain, plan again. One file per step."""
