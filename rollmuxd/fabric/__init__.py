"""Pure models of links and of transfers over them, shared by the simulator and by what moves weights."""
