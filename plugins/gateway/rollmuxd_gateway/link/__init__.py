"""How the gateway and the daemon meet: through the slot that the job has anyway."""
