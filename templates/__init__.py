"""What a cluster looks like: shell in Jinja and one TOML profile a site. No Python is needed here."""
