"""The train half: what runs on the nodes. It imports torch, and never click or jinja2."""
