"""What a cluster looks like: shell in Jinja, one TOML profile a site, and no Python."""
