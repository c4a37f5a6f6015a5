"""How the daemon reaches hosts: orders that it carries out, observations, and calls of plugins."""
