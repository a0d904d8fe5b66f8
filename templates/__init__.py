"""Scripts as Jinja templates, and one TOML profile per cluster."""
