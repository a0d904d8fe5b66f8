"""For launchers of older versions that are at work while this one is installed in their place."""

NAME = "hpcddp-sentry"
