"""Which caller may see and do what: keys, roles, owners, and the names in what is shown."""
